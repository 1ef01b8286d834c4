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
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
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
		"line\nbreak", "tab\tcr\r", "\x01\x1f\x7f", "ünïcödé", "日本語", "🦫", "a\u2028b", "\uFFFD", "E'\\n'", strings.Repeat(`\"`, 512),
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
					t.Errorf("%s: message %d is %q, key %q, headers %q; want %+v", topic, i, text, m.Key, m.Headers, want)
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
				if err == nil && !slices.Equal(ids, []weir.Produced{{ID: 1}, {ID: 2}}) {
					t.Errorf("results are %v", ids)
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
			if err != nil || !slices.Equal(ids, []weir.Produced{{ID: 1}, {ID: 2}}) {
				t.Errorf("results are %v, error %v", ids, err)
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

// What a message has more than key, headers and payload arrives, by every way of producing.
func TestProduceOptions(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	conn := connect(t, dsn)
	at := time.Date(2099, 12, 31, 23, 59, 59, 123456789, time.FixedZone("", 5*3600))
	messages := []weir.Message{
		{Payload: 0},
		{Payload: 1, DeliverAt: at},
		{Payload: 2, Delay: 3650 * 24 * time.Hour},
		{Payload: 3, Priority: -10, Timeout: time.Millisecond},
		{Payload: 4, Priority: 10, Timeout: 7 * 24 * time.Hour},
		{Payload: 5, DeliverAt: time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC)},
		{Payload: 6, DeliverAt: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), Priority: 1},
		{Payload: 7, Key: strings.Repeat("é", 512), Delay: 90*time.Minute + 1500*time.Microsecond},
	}
	want := []string{
		"- - -",
		"2099-12-31 18:59:59.123456 - -",
		"after 315360000 - -",
		"- -10 0.001",
		"- 10 604800",
		"0001-01-01 00:00:01 - -",
		"9999-12-31 23:59:59 1 -",
		"after 5400 - -",
	}
	for _, format := range []weir.Format{weir.JSON, weir.JSONB, weir.Bytes} {
		for _, p := range producers {
			topic := p.name + " " + string(format)
			noError(t, c.CreateTopic(t.Context(), topic, &weir.TopicOptions{Format: format}))
			sent := slices.Clone(messages)
			for i := range sent {
				sent[i].Payload = []byte(fmt.Sprint(sent[i].Payload))
			}
			noError(t, p.run(t, c, dsn, topic, true, sent...))
			got := column[string](t, conn, fmt.Sprintf(`
				select concat_ws(' ',
					case
						when deliver_at is null then '-'
						when deliver_at - produced_at < '4000 days' and deliver_at > produced_at
						then 'after ' || round(extract(epoch from deliver_at - produced_at))
						else (deliver_at at time zone 'UTC')::text
					end,
					coalesce(priority::text, '-'), coalesce(trim_scale(extract(epoch from timeout))::text, '-'))
				from weir.log_%d
				order by id`, value[int](t, conn, "select id from weir.topic where name = $1", topic)))
			if !slices.Equal(got, want) {
				t.Errorf("%s: stored %q, want %q", topic, got, want)
			}
		}
	}
}

// What no message can have is refused before anything of the call is stored, with its place and field, by every way.
func TestBadMessages(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	conn := connect(t, dsn)
	now := time.Now()
	for _, p := range producers {
		noError(t, c.CreateTopic(t.Context(), p.name, nil))
		for _, bad := range []struct {
			message  weir.Message
			sentinel error
			parts    []string
		}{
			{weir.Message{Key: strings.Repeat("x", 1025)}, weir.ErrInvalid, []string{"key", "1025", "1024"}},
			{weir.Message{Key: strings.Repeat("é", 513)}, weir.ErrInvalid, []string{"key", "1026", "1024"}},
			{weir.Message{DeliverAt: now, Delay: 1}, weir.ErrInvalid, []string{"delay", "time of delivery"}},
			{weir.Message{DeliverAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}, weir.ErrInvalid, []string{"time of delivery", "9999"}},
			{weir.Message{DeliverAt: time.Date(9999, 12, 31, 23, 0, 0, 0, time.FixedZone("", -7200))}, weir.ErrInvalid, []string{"time of delivery", "9999"}},
			{weir.Message{DeliverAt: time.Unix(1<<62, 0)}, weir.ErrInvalid, []string{"time of delivery", "9999"}},
			{weir.Message{DeliverAt: time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC)}, weir.ErrInvalid, []string{"time of delivery"}},
			{weir.Message{Delay: -1}, weir.ErrInvalid, []string{"delay", "-1ns"}},
			{weir.Message{Delay: 3650*24*time.Hour + 1}, weir.ErrInvalid, []string{"delay", "3650 days"}},
			{weir.Message{Priority: 11}, weir.ErrInvalid, []string{"priority", "11", "10"}},
			{weir.Message{Priority: -11}, weir.ErrInvalid, []string{"priority", "-11"}},
			{weir.Message{Priority: 1 << 40}, weir.ErrInvalid, []string{"priority"}},
			{weir.Message{Timeout: -time.Second}, weir.ErrInvalid, []string{"timeout", "-1s"}},
			{weir.Message{Timeout: time.Microsecond}, weir.ErrInvalid, []string{"timeout", "1 ms"}},
			{weir.Message{Timeout: 7*24*time.Hour + 1}, weir.ErrInvalid, []string{"timeout", "7 days"}},
			{weir.Message{IdempotencyKey: strings.Repeat("é", 201)}, weir.ErrInvalid, []string{"idempotency key", "201", "200"}},
			{weir.Message{IdempotencyKey: "a\x00"}, weir.ErrFormat, []string{"idempotency key", "NUL"}},
			{weir.Message{IdempotencyKey: "\xff"}, weir.ErrFormat, []string{"idempotency key", "UTF-8"}},
		} {
			bad.message.Payload = 1
			err := p.run(t, c, dsn, p.name, true, weir.Message{Payload: 0}, bad.message)
			wantError(t, err, bad.sentinel, append(bad.parts, "message 1")...)
		}
		if got := stored(t, c, p.name); len(got) != 0 {
			t.Errorf("%s: %d are stored, want none", p.name, len(got))
		}
	}

	// From SQL, in words of its own.
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	noError(t, c.CreateTopic(t.Context(), "b", &weir.TopicOptions{Format: weir.Bytes}))
	id := value[int](t, conn, "select id from weir.topic where name = 't'")
	for argument, wanted := range map[string]string{
		"deliver_at => 'infinity'":                          "WE003 deliver_at is infinity, it must be a time before the year 10000",
		"deliver_at => '-infinity'":                         "WE003 deliver_at is -infinity",
		"deliver_at => '10000-01-01 00:00:00+00'":           "WE003 deliver_at is 10000-01-01 00:00:00+00",
		"deliver_at => '2030-01-01 00:00 Nowhere/Land'":     "22023 time zone \"nowhere/land\" not recognized",
		"deliver_at => '2030-01-01 00:00+99'":               "22009 time zone displacement out of range",
		"deliver_at => '2030-02-30 00:00+00'":               "22008 date/time field value out of range",
		"deliver_at => '2030-01-01 00:00Z', delay => '0 s'": "WE003 deliver_at and delay are both given",
		"delay => '-1 us'":                                  "WE003 delay is -00:00:00.000001, it must be from 0 s to 3650 days",
		"delay => '3651 days'":                              "WE003 delay is 3651 days",
		"priority => 11":                                    "WE003 priority is 11, it must be from -10 to 10",
		"priority => -11":                                   "WE003 priority is -11",
		"timeout => '0 s'":                                  "WE003 timeout is 00:00:00, it must be more than 0 s and at most 7 days",
		"timeout => '-1 s'":                                 "WE003 timeout is -00:00:01",
		"timeout => '7 days 1 us'":                          "WE003 timeout is 7 days",
		"idempotency_key => ''":                             "WE003 idempotency_key has 0 characters, it must have 1 to 200",
		"idempotency_key => repeat('é', 201)":               "WE003 idempotency_key has 201 characters",
		"key => repeat('é', 513)":                           "WE003 key has 1026 bytes, it must have at most 1024",
	} {
		for _, call := range []string{"weir.produce('t', '1', ", "weir.produce_bytes('b', '1', "} {
			refusedWith(t, conn, "select "+call+argument+")", wanted)
		}
	}
	for arguments, wanted := range map[string]string{
		"keys => array['a', repeat('x', 1025)]":                             "WE003 keys[2] has 1025 bytes",
		"deliver_at => array[now(), 'infinity']":                            "WE003 deliver_at[2] is infinity",
		"priorities => '{null,11}'":                                         "WE003 priorities[2] is 11",
		"timeouts => array['1 s', '0 s']::interval[]":                       "WE003 timeouts[2] is 00:00:00",
		"idempotency_keys => array[null, '']":                               "WE003 idempotency_keys[2] has 0 characters",
		"keys => '{a}'":                                                     "WE003 payloads has 2 entries, keys has 1",
		"headers => '{null,null,null}'":                                     "WE003 payloads has 2 entries, headers has 3",
		"idempotency_keys => '{}'":                                          "WE003 payloads has 2 entries, idempotency_keys has 0",
		"deliver_at => array[null, now()], delays => '{null,1 s}'":          "WE003 deliver_at and delay are both given, for message 2",
		"delays => array[null, '-1 s']::interval[]":                         "WE003 delays[2] is -00:00:01",
		"producer => 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', batch => 0":    "WE003 batch is 0",
		"producer => 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', batch => null": "WE003 batch is null",
		"batch => 1": "WE003 producer is null",
	} {
		for _, call := range []string{"weir.produce_batch('t', '{1,2}', ", "weir.produce_batch_bytes('b', '{1,2}', "} {
			refusedWith(t, conn, "select "+call+arguments+")", wanted)
		}
		if strings.Contains(arguments, "delays") || strings.Contains(arguments, "batch") {
			continue
		}
		for _, call := range []string{"weir.produce_many('t', '{1,2}', ", "weir.produce_many_bytes('b', '{1,2}', "} {
			refusedWith(t, conn, "select "+call+arguments+")", wanted)
		}
	}
	refusedWith(t, conn, "select weir.produce_many('t', null)", "WE003 payloads has no entries")
	// By hand the table itself refuses, and names what it does not take.
	for column, text := range map[string]string{
		"key": strings.Repeat("x", 1025), "deliver_at": "infinity", "priority": "11", "timeout": "0 s",
	} {
		table := pgx.Identifier{"weir", fmt.Sprintf("log_%d", id)}
		refusedWith(t, conn, fmt.Sprintf("insert into %s (%s, payload) values ('%s', '1')", table.Sanitize(), column, text), "23514", "log_"+column)
		_, err := conn.PgConn().CopyFrom(t.Context(), strings.NewReader(text+"\t1\n"),
			fmt.Sprintf("copy %s (%s, payload) from stdin", table.Sanitize(), column))
		if err == nil || !strings.Contains(err.Error(), "log_"+column) {
			t.Errorf("copy of %s: error is %v", column, err)
		}
	}
	for _, topic := range []string{"t", "b"} {
		if got := stored(t, c, topic); len(got) != 0 {
			t.Errorf("%s: %d are stored, want none", topic, len(got))
		}
	}
	if n := value[int](t, conn, "select count(*)::int from weir.idempotency"); n != 0 {
		t.Errorf("%d idempotency keys are remembered, want none", n)
	}
}

// refusedWith demands that a statement is refused with a state and a text.
func refusedWith(t *testing.T, conn *pgx.Conn, statement string, wanted ...string) {
	t.Helper()
	_, err := conn.Exec(t.Context(), statement)
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		t.Errorf("%s: error is %v, want %q", statement, err, wanted)
		return
	}
	got := pg.Code + " " + pg.Message
	for _, part := range wanted {
		if !strings.Contains(got, part) {
			t.Errorf("%s: error is %q, want %q", statement, got, part)
		}
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
			nested = idsOf(ids)
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
	if len(nested) != 1 || len(handled.missing(idsOf(ids))) > 0 {
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

// TestProducersBeginAtOnce: whoever is among the first of a new topic does not take what the others have stored meanwhile for ids of a
// sequence that was left behind.
func TestProducersBeginAtOnce(t *testing.T) {
	t.Parallel()
	const producers, topics = 24, 10
	c, dsn := openOn(t, pgtest.New(t, &pgtest.Options{Fast: true}), nil)
	var conns []*pgx.Conn
	for range producers {
		conns = append(conns, connect(t, dsn))
	}
	for n := range topics {
		topic := fmt.Sprint("t", n)
		topicAndGroup(t, c, topic, "g", nil, nil)
		var wrong errorsOf
		var tasks sync.WaitGroup
		start := make(chan struct{})
		for i, conn := range conns {
			tasks.Go(func() {
				<-start
				for range 5 {
					if _, err := conn.Exec(t.Context(), "select weir.produce($1, '1')", topic); err != nil {
						wrong.add("produce: %w", err)
					}
					if i%4 == 0 {
						if _, err := conn.Exec(t.Context(), "select weir.poll($1, 'g', 'c', 0, '1 min', 1, null, true)", topic); err != nil {
							wrong.add("poll: %w", err)
						}
					}
				}
			})
		}
		close(start)
		tasks.Wait()
		wrong.none(t)
	}
}
