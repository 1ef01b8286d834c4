package weir_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/weirhq/weir"
)

// producer is one of the ways to produce.
type producer struct {
	name string
	// tx: it produces in a transaction that the test ends
	tx  bool
	run func(t *testing.T, c *weir.Client, dsn, topic string, commit bool, messages ...weir.Message) error
}

// sequence gives messages one by one.
func sequence(messages []weir.Message) iter.Seq2[weir.Message, error] {
	return func(yield func(weir.Message, error) bool) {
		for _, m := range messages {
			if !yield(m, nil) {
				return
			}
		}
	}
}

func inTx(t *testing.T, dsn string, commit bool, f func(tx pgx.Tx) error) error {
	conn, err := pgx.Connect(t.Context(), dsn)
	noError(t, err)
	defer conn.Close(context.Background())
	tx, err := conn.Begin(t.Context())
	noError(t, err)
	defer tx.Rollback(context.Background())
	if err := f(tx); err != nil {
		return err
	}
	if commit {
		return tx.Commit(t.Context())
	}
	return tx.Rollback(t.Context())
}

var producers = []producer{
	{"Produce", false, func(t *testing.T, c *weir.Client, _, topic string, _ bool, messages ...weir.Message) error {
		_, err := c.Produce(t.Context(), topic, messages...)
		return err
	}},
	{"Copy", false, func(t *testing.T, c *weir.Client, _, topic string, _ bool, messages ...weir.Message) error {
		n, err := c.Copy(t.Context(), topic, sequence(messages))
		if err == nil && n != int64(len(messages)) {
			t.Errorf("Copy stored %d, want %d", n, len(messages))
		}
		return err
	}},
	{"ProduceTx", true, func(t *testing.T, c *weir.Client, dsn, topic string, commit bool, messages ...weir.Message) error {
		return inTx(t, dsn, commit, func(tx pgx.Tx) error {
			_, err := c.ProduceTx(t.Context(), tx, topic, messages...)
			return err
		})
	}},
	{"CopyTx", true, func(t *testing.T, c *weir.Client, dsn, topic string, commit bool, messages ...weir.Message) error {
		return inTx(t, dsn, commit, func(tx pgx.Tx) error {
			_, err := c.CopyTx(t.Context(), tx, topic, sequence(messages))
			return err
		})
	}},
	{"ProduceSQL", true, func(t *testing.T, c *weir.Client, dsn, topic string, commit bool, messages ...weir.Message) error {
		db, err := sql.Open("pgx", dsn)
		noError(t, err)
		defer db.Close()
		tx, err := db.BeginTx(t.Context(), nil)
		noError(t, err)
		defer tx.Rollback()
		if _, err := c.ProduceSQL(t.Context(), tx, topic, messages...); err != nil {
			return err
		}
		if commit {
			return tx.Commit()
		}
		return tx.Rollback()
	}},
}

// stored reads a whole topic, once its settled head has come to its head.
func stored(t *testing.T, c *weir.Client, topic string) []weir.Received[[]byte] {
	t.Helper()
	var all []weir.Received[[]byte]
	after := int64(0)
	eventually(t, "the topic can be read to its head", func() bool {
		top, err := c.Topic(t.Context(), topic)
		noError(t, err)
		for {
			next, err := c.Read(t.Context(), topic, after, 10_000)
			noError(t, err)
			if len(next) == 0 {
				break
			}
			all = append(all, next...)
			after = next[len(next)-1].ID
		}
		return top.Head == top.Settled
	})
	return all
}

// What is hard to quote, by every way of producing and on every format: it comes back as it was.
func TestProduceKeepsWhatItIsGiven(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	texts := []string{
		"", " ", "plain", `"`, `\`, `\\`, `\"`, `{`, `}`, `{"a",b}`, `NULL`, `null`, `,`, `'`, `''`, `$1`, `\x41`, `\u0041`,
		"line\nbreak", "tab\tcr\r", "\x01\x1f\x7f", "ünïcödé", "日本語", "🦫", "a\u2028b", "\uFFFD", "E'\\n'", strings.Repeat(`\"`, 1000),
	}
	var messages []weir.Message
	for i, s := range texts {
		messages = append(messages, weir.Message{
			Key: s, Headers: map[string]string{"text": s, s: "key", "i": fmt.Sprint(i)}, Payload: s,
		})
	}
	messages = append(messages, weir.Message{Payload: "no key, no headers"})
	for _, format := range []weir.Format{weir.JSON, weir.JSONB, weir.Bytes} {
		for _, p := range producers {
			topic := p.name + " " + string(format)
			noError(t, c.CreateTopic(t.Context(), topic, &weir.TopicOptions{Format: format}))
			if err := p.run(t, c, dsn, topic, true, messages...); err != nil {
				t.Errorf("%s: %v", topic, err)
				continue
			}
			got := stored(t, c, topic)
			if len(got) != len(messages) {
				t.Errorf("%s: %d stored, want %d", topic, len(got), len(messages))
				continue
			}
			for i, m := range got {
				want := messages[i]
				text := string(m.Raw)
				if format != weir.Bytes {
					if err := json.Unmarshal(m.Raw, &text); err != nil {
						t.Errorf("%s: message %d: %v", topic, i, err)
					}
				}
				if text != want.Payload || m.Key != want.Key || !reflect.DeepEqual(m.Headers, want.Headers) {
					t.Errorf("%s: message %d is %q, key %q, headers %q; want %q", topic, i, text, m.Key, m.Headers, want)
				}
			}
		}
	}
	if conn := connect(t, dsn); value[int](t, conn, "select count(*) from weir.log_1 where key is null") != 2 {
		t.Error("no key, and an empty one, are stored as null")
	}
}

func TestProduceInTransaction(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	conn := connect(t, dsn)
	for _, p := range producers {
		if !p.tx {
			continue
		}
		noError(t, c.CreateTopic(t.Context(), p.name, nil))
		noError(t, p.run(t, c, dsn, p.name, false, numbers(5)...))
		if got := stored(t, c, p.name); len(got) != 0 {
			t.Errorf("%s: %d messages after a rollback", p.name, len(got))
		}
		noError(t, p.run(t, c, dsn, p.name, true, numbers(5)...))
		got := stored(t, c, p.name)
		var values []string
		for _, m := range got {
			values = append(values, string(m.Raw))
		}
		if !slices.Equal(values, []string{"1", "2", "3", "4", "5"}) {
			t.Errorf("%s: stored %v", p.name, values)
		}
		if n := value[int](t, conn, "select count(*) from weir.log_"+fmt.Sprint(value[int](t, conn, "select id from weir.topic where name = $1", p.name))); n != 5 {
			t.Errorf("%s: %d rows in the log, want 5", p.name, n)
		}
	}

	// Produced in the transaction that creates the topic, and with business data of its own.
	for _, how := range []string{"pgx", "sql"} {
		topic := "born with " + how
		if how == "pgx" {
			noError(t, inTx(t, dsn, true, func(tx pgx.Tx) error {
				execute(t, tx, "create table business (id int)")
				execute(t, tx, "select weir.create_topic($1)", topic)
				ids, err := c.ProduceTx(t.Context(), tx, topic, numbers(2)...)
				if err == nil && !slices.Equal(ids, []int64{1, 2}) {
					t.Errorf("ids are %v", ids)
				}
				return err
			}))
		} else {
			db := stdlib.OpenDB(*conn.Config())
			defer db.Close()
			tx, err := db.BeginTx(t.Context(), nil)
			noError(t, err)
			_, err = tx.ExecContext(t.Context(), "select weir.create_topic($1)", topic)
			noError(t, err)
			ids, err := c.ProduceSQL(t.Context(), tx, topic, numbers(2)...)
			if err != nil || !slices.Equal(ids, []int64{1, 2}) {
				t.Errorf("ids are %v, error %v", ids, err)
			}
			_, err = tx.ExecContext(t.Context(), "insert into business values (1)")
			noError(t, err)
			noError(t, tx.Commit())
		}
		if got := stored(t, c, topic); len(got) != 2 {
			t.Errorf("%s: %d stored", topic, len(got))
		}
	}

	// A transaction goes on after what the client refuses by itself.
	noError(t, inTx(t, dsn, true, func(tx pgx.Tx) error {
		_, err := c.ProduceTx(t.Context(), tx, "ProduceTx", weir.Message{Payload: 1}, weir.Message{Payload: math.NaN()})
		wantError(t, err, weir.ErrFormat, "message 1")
		_, err = c.ProduceTx(t.Context(), tx, "ProduceTx", weir.Message{Payload: 6})
		return err
	}))
	if n := len(stored(t, c, "ProduceTx")); n != 6 {
		t.Errorf("%d stored, want 6", n)
	}
}

// A topic that was dropped and made anew, with another number and format, behind the client's back.
func TestProduceToARecreatedTopic(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	conn := connect(t, dsn)
	for _, p := range producers {
		topic := p.name
		noError(t, c.CreateTopic(t.Context(), topic, nil))
		produced(t, c, topic, numbers(1)...) // the client remembers it
		execute(t, conn, "select weir.drop_topic($1)", topic)
		execute(t, conn, "select weir.create_topic($1)", topic)
		if err := p.run(t, c, dsn, topic, true, numbers(3)...); err != nil {
			t.Errorf("%s: %v", p.name, err)
		} else if n := len(stored(t, c, topic)); n != 3 {
			t.Errorf("%s: %d stored, want 3", p.name, n)
		}
		execute(t, conn, "select weir.drop_topic($1)", topic)
		execute(t, conn, `select weir.create_topic($1, '{"format": "bytes"}')`, topic)
		// The first may be refused, but not a later one.
		err := p.run(t, c, dsn, topic, true, weir.Message{Payload: "x"})
		if err != nil {
			wantError(t, err, weir.ErrFormat)
			err = p.run(t, c, dsn, topic, true, weir.Message{Payload: "x"})
		}
		if err != nil {
			t.Errorf("%s to a topic of another format: %v", p.name, err)
		}
		execute(t, conn, "select weir.drop_topic($1)", topic)
		wantError(t, p.run(t, c, dsn, topic, true, weir.Message{Payload: "x"}), weir.ErrTopicNotFound, topic)
	}
}

type oddPayload struct {
	name     string
	payload  any
	jsonFits bool // a json topic takes it, byte for byte
	jsonb    bool // a jsonb topic takes it
	bytes    bool // a bytes topic takes it, byte for byte
}

// What drivers, JSON and PostgreSQL see with different eyes: it comes back byte for byte, or is refused with ErrFormat
// before anything of the call is stored.
func TestOddPayloads(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	raw := func(s string) json.RawMessage { return json.RawMessage(s) }
	cases := []oddPayload{
		{"escaped NUL", raw(`"a\u0000b"`), true, false, true},
		{"raw NUL", raw("\"a\x00b\""), false, false, true},
		{"lone surrogate", raw(`"\ud800"`), true, false, true},
		{"reversed surrogates", raw(`"\udc00\ud800"`), true, false, true},
		{"surrogate pair", raw(`"\ud83e\uddab"`), true, true, true},
		{"NaN", raw(`NaN`), false, false, true},
		{"NaN float", math.NaN(), false, false, false},
		{"infinite float", math.Inf(1), false, false, false},
		{"1e131072", raw(`1e131072`), true, false, true},
		{"1e-20000", raw(`1e-20000`), true, false, true},
		{"2^53+1", raw(`9007199254740993`), true, true, true},
		{"2^53+1 integer", int64(9007199254740993), true, true, false},
		{"long number", raw(`0.1000000000000000055511151231257827021181583404541015625`), true, true, true},
		{"minus zero", raw(`-0`), true, true, true},
		{"key order and duplicates", raw(`{"b": 1,  "a": 2, "b": 3}`), true, true, true},
		{"white space", raw(" \n[ 1 ,\t2 ]\r\n"), true, true, true},
		{"invalid UTF-8", raw("\"\xff\""), false, false, true},
		{"cut UTF-8", raw("\"\xe2\x82\""), false, false, true},
		{"surrogate in UTF-8", raw("\"\xed\xa0\x80\""), false, false, true},
		{"invalid UTF-8 string", "a\xffb", false, false, true},
		{"empty", raw(``), false, false, true},
		{"cut off", raw(`{"a":`), false, false, true},
		{"two values", raw(`1 2`), false, false, true},
		{"byte order mark", raw("\uFEFF1"), false, false, true},
		{"null", raw(`null`), true, true, true},
		{"nil", nil, true, true, false},
		{"nil bytes", []byte(nil), false, false, false},
		{"no JSON value", func() {}, false, false, false},
		{"all bytes", slices.Collect(func(yield func(byte) bool) {
			for i := range 256 {
				if !yield(byte(i)) {
					return
				}
			}
		}), false, false, true},
		{"deep", raw(strings.Repeat("[", 1000) + strings.Repeat("]", 1000)), true, true, true},
		{"escapes", raw(`"\/\b\f\n\r\t\u00e9"`), true, true, true},
	}
	for _, format := range []weir.Format{weir.JSON, weir.JSONB, weir.Bytes} {
		for _, p := range producers {
			topic := p.name + " " + string(format)
			noError(t, c.CreateTopic(t.Context(), topic, &weir.TopicOptions{Format: format}))
			expected := 0
			var want []oddPayload
			for _, odd := range cases {
				fits := map[weir.Format]bool{weir.JSON: odd.jsonFits, weir.JSONB: odd.jsonb, weir.Bytes: odd.bytes}[format]
				neighbour := weir.Message{Payload: json.RawMessage(`"neighbour"`)}
				err := p.run(t, c, dsn, topic, true, neighbour, weir.Message{Payload: odd.payload}, neighbour)
				switch {
				case fits && err != nil:
					t.Errorf("%s: %s: %v", topic, odd.name, err)
				case fits:
					expected += 3
					want = append(want, odd)
				case err == nil:
					t.Errorf("%s: %s: it was stored", topic, odd.name)
				default:
					if !errors.Is(err, weir.ErrFormat) {
						t.Errorf("%s: %s: error is %v, want ErrFormat", topic, odd.name, err)
					}
				}
			}
			got := stored(t, c, topic)
			if len(got) != expected {
				t.Errorf("%s: %d are stored, want %d", topic, len(got), expected)
				continue
			}
			for i, odd := range want {
				m := got[3*i+1].Raw
				if format == weir.JSONB { // parsed: equal as a value
					if !json.Valid(m) {
						t.Errorf("%s: %s came back as %q", topic, odd.name, m)
					}
					continue
				}
				sent, err := json.Marshal(odd.payload)
				noError(t, ignoreFor(odd, err))
				switch v := odd.payload.(type) {
				case json.RawMessage:
					sent = v
				case []byte:
					sent = v
				case string:
					if format == weir.Bytes {
						sent = []byte(v)
					}
				}
				if !bytes.Equal(m, sent) {
					t.Errorf("%s: %s came back as %q, was %q", topic, odd.name, m, sent)
				}
			}
		}
	}
}

// ignoreFor leaves out the error of marshalling what is sent as it is.
func ignoreFor(odd oddPayload, err error) error {
	if _, ok := odd.payload.(json.RawMessage); ok {
		return nil
	}
	return err
}

func TestOddKeysAndHeaders(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	for _, p := range producers {
		noError(t, c.CreateTopic(t.Context(), p.name, nil))
		for _, m := range []weir.Message{
			{Key: "a\x00b"},
			{Key: "\xff"},
			{Headers: map[string]string{"a": "\x00"}},
			{Headers: map[string]string{"\x00": "a"}},
			{Headers: map[string]string{"a": "\xff"}},
			{Headers: map[string]string{"\xff": "a"}},
		} {
			m.Payload = 1
			err := p.run(t, c, dsn, p.name, true, weir.Message{Payload: 0}, m)
			wantError(t, err, weir.ErrFormat, "message 1")
		}
		if got := stored(t, c, p.name); len(got) != 0 {
			t.Errorf("%s: %d are stored, want none", p.name, len(got))
		}
	}
	// From SQL, headers can have any value.
	conn := connect(t, dsn)
	execute(t, conn, `select weir.produce('Produce', '1', null, '{"n": 1, "o": {"a": [null]}, "s": "x", "z": null}')`)
	got := stored(t, c, "Produce")
	want := map[string]string{"n": "1", "o": `{"a": [null]}`, "s": "x", "z": "null"}
	if len(got) != 1 || got[0].Headers["n"] != "1" || got[0].Headers["s"] != "x" || got[0].Headers["o"] != want["o"] {
		t.Errorf("headers are %v, want %v", got[0].Headers, want)
	}
}

// The text of an error that no text column takes is recorded nevertheless.
func TestOddErrorTexts(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{MaxAttempts: 1})
	texts := []string{"\x00", "\xff\xfe", "", strings.Repeat("é", 10_000), "\ud7ff\xed\xa0\x80", `"\u0000"`}
	produced(t, c, "t", numbers(len(texts))...)
	consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		return errors.New(texts[m.Value-1])
	}), nil)
	eventually(t, "all are dead", func() bool { return group(t, c, "t", "g").Dead == len(texts) })
	dead, err := c.DeadLetters(t.Context(), "t", "g", 0, 100)
	noError(t, err)
	want := []string{"\uFFFD", "\uFFFD", "", strings.Repeat("é", 4000), "\ud7ff\uFFFD", `"\u0000"`}
	for i, d := range dead {
		if d.Error != want[i] {
			t.Errorf("error %q is recorded as %.100q, want %.100q", texts[i], d.Error, want[i])
		}
	}
}

func TestLargeMessages(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	type large struct {
		ID   int64
		Size int
		Sum  byte
	}
	for _, format := range []weir.Format{weir.JSON, weir.Bytes} {
		topic := string(format)
		topicAndGroup(t, c, topic, "g", &weir.TopicOptions{Format: format}, nil)
		got := make(chan large, 10)
		k := consume(t, c, topic, "g", weir.Handle(func(_ context.Context, m *weir.Received[[]byte]) error {
			got <- large{m.ID, len(m.Raw), m.Raw[len(m.Raw)/2]}
			return nil
		}), nil)
		for _, size := range []int{1 << 20, 64 << 20} {
			payload := bytes.Repeat([]byte{'x'}, size)
			payload[0], payload[size-1], payload[size/2] = '"', '"', 'y'
			began := time.Now()
			ids := produced(t, c, topic, weir.Message{Payload: json.RawMessage(payload)}, weir.Message{Payload: json.RawMessage(`"z"`)})
			stored := time.Since(began)
			for _, want := range []large{{ids[0], size, 'y'}, {ids[1], 3, 'z'}} {
				select {
				case m := <-got:
					if m != want {
						t.Errorf("%s: got %+v, want %+v", topic, m, want)
					}
				case <-time.After(time.Minute):
					t.Fatalf("%s: a message of %d bytes does not arrive; stats are %+v", topic, size, k.Stats())
				}
			}
			t.Logf("%s: %d bytes stored in %v, handled after %v", topic, size, stored.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
		}
		k.stop()
		if s := k.Stats(); s.Handled != 4 || s.Failed != 0 || s.Lost != 0 {
			t.Errorf("%s: stats are %+v", topic, s)
		}
	}
	limit := make([]byte, weir.MaxPayload+1)
	for _, p := range producers {
		err := p.run(t, c, dsn, "bytes", true, weir.Message{Payload: limit})
		wantError(t, err, weir.ErrInvalid, "payload", fmt.Sprint(weir.MaxPayload))
	}
	_, err := c.Produce(t.Context(), "bytes", weir.Message{Payload: limit[:weir.MaxPayload]}, weir.Message{Payload: limit[:weir.MaxPayload]}, weir.Message{Payload: "x"})
	wantError(t, err, weir.ErrInvalid, "messages")
	if top, err := c.Topic(t.Context(), "bytes"); err != nil || top.Head != 4 {
		t.Errorf("topic is %+v, %v; want nothing stored", top, err)
	}
}

// A stream that is larger than one batch may be, whatever its payloads are.
func TestCopyLargeStream(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	payload := struct{ Text string }{strings.Repeat("x", 4<<20)}
	n, err := c.Copy(t.Context(), "t", func(yield func(weir.Message, error) bool) {
		for range 70 { // 280 MiB
			if !yield(weir.Message{Payload: payload}, nil) {
				return
			}
		}
	})
	if err != nil || n != 70 {
		t.Errorf("stored %d, %v", n, err)
	}
}

func TestCopyManySegments(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000}))
	messages := numbers(25_000)
	n, err := c.Copy(t.Context(), "t", sequence(messages))
	if err != nil || n != 25_000 {
		t.Fatalf("stored %d, %v", n, err)
	}
	for i, m := range stored(t, c, "t") {
		if string(m.Raw) != fmt.Sprint(i+1) {
			t.Fatalf("message %d is %s", i+1, m.Raw)
		}
	}
	boom := errors.New("boom")
	_, err = c.Copy(t.Context(), "t", func(yield func(weir.Message, error) bool) {
		for _, m := range messages[:12_000] {
			if !yield(m, nil) {
				return
			}
		}
		yield(weir.Message{}, boom)
	})
	if !errors.Is(err, boom) || len(stored(t, c, "t")) != 25_000 {
		t.Errorf("a stream that failed: %v, %d stored", err, len(stored(t, c, "t")))
	}
}

func TestProduceNothing(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	for _, p := range producers {
		if err := p.run(t, c, dsn, "t", true); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
		wantError(t, p.run(t, c, dsn, "missing", true, numbers(1)...), weir.ErrTopicNotFound, "missing")
	}
}

// A pool of one connection is enough for everything, also when a transaction of the caller's has it.
func TestPoolOfOne(t *testing.T) {
	t.Parallel()
	_, dsn := open(t, nil)
	one := func(config *pgxpool.Config) { config.MaxConns = 1 }
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	pool := newPool(t, dsn, one)
	c := newOn(t, pool, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	handled := newTally()
	var nested []int64
	consume(t, c, "t", "g", weir.Handle(func(ctx context.Context, m *weir.Received[int]) error {
		handled.add(m.ID)
		if m.Value == 3 {
			ids, err := c.Produce(ctx, "t", weir.Message{Payload: 100})
			nested = ids
			return err
		}
		return nil
	}), nil)
	ids, err := c.Produce(ctx, "t", numbers(3)...)
	noError(t, err)
	n, err := c.Copy(ctx, "t", sequence(numbers(3)))
	if err != nil || n != 3 {
		t.Fatalf("Copy: %d, %v", n, err)
	}
	eventually(t, "all are handled", func() bool { return handled.distinct() == 7+1 })
	if len(nested) != 1 || len(handled.missing(ids)) > 0 {
		t.Errorf("handled %v", handled.times)
	}

	// A client's first call, within the transaction that has the connection.
	calls := map[string]func(c *weir.Client, pool *pgxpool.Pool) error{
		"CopyTx": func(c *weir.Client, pool *pgxpool.Pool) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := c.CopyTx(ctx, tx, "t", sequence(numbers(2)))
				return err
			})
		},
		"ProduceTx": func(c *weir.Client, pool *pgxpool.Pool) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := c.ProduceTx(ctx, tx, "t", numbers(2)...)
				return err
			})
		},
		"ProduceSQL": func(c *weir.Client, pool *pgxpool.Pool) error {
			db := stdlib.OpenDBFromPool(pool)
			defer db.Close()
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if _, err := c.ProduceSQL(ctx, tx, "t", numbers(2)...); err != nil {
				return err
			}
			return tx.Commit()
		},
	}
	for name, call := range calls {
		pool := newPool(t, dsn, one)
		c, err := weir.New(pool, nil)
		noError(t, err)
		if err := call(c, pool); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		c.Close()
	}
	eventually(t, "these are handled, too", func() bool { return handled.distinct() == 8+6 })
}
