package weir_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weirhq/weir"
)

// diesOf makes a handler for which the messages die that bad reports; the others are handled.
func diesOf(y *tally, bad func(m *weir.Received[int]) bool) weir.Handler {
	return weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		if bad(m) {
			return weir.Dead(fmt.Errorf("refused %d", m.Value))
		}
		y.add(m.ID)
		return nil
	})
}

// bury makes dead letters of a topic's messages, as many attempts as their id modulo 5, plus 1, one second after the other.
func bury(t *testing.T, q querier, group string) {
	t.Helper()
	execute(t, q, `
		insert into weir.delivery
			(group_id, message_id, state, due_at, attempt, shard, key, headers, payload, produced_at, errors)
		select g.id, l.id, 'dead', clock_timestamp(), l.id % 5 + 1,
			case when g.mode = 'ordered' then (coalesce(hashtextextended(l.key collate "C", 0), hashint8extended(l.id, 0)) & (g.shards - 1))::int end,
			l.key, l.headers, l.payload, l.produced_at,
			jsonb_build_array(
				jsonb_build_object('attempt', 1, 'at', '2026-01-01T00:00:00Z', 'error', 'first'),
				jsonb_build_object('attempt', 2, 'at', timestamptz '2026-01-01T00:00:00Z' + l.id * interval '1 s', 'error', format('refused %s', l.id)))
		from weir.log_1 as l
		cross join weir.consumer_group as g
		where g.name = $1`, group)
}

// settledAt moves a group past everything, once that is settled.
func settledAt(t *testing.T, c *weir.Client, topic, name string) {
	t.Helper()
	eventually(t, "all is settled", func() bool {
		_, err := c.Seek(t.Context(), topic, name, weir.Head())
		noError(t, err)
		g := group(t, c, topic, name)
		return g.Claimed == g.Head
	})
}

func deadIDs(t *testing.T, c *weir.Client, filter weir.DeadFilter) []int64 {
	t.Helper()
	list, err := c.FindDeadLetters(t.Context(), "t", "g", filter, 0, 10_000)
	noError(t, err)
	ids := []int64{}
	for _, d := range list {
		ids = append(ids, d.ID)
	}
	return ids
}

// Each part of a filter picks what it says, for listing, redriving and purging alike; SQL and Go agree.
func TestDeadFilters(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	conn := connect(t, dsn)
	var messages []weir.Message
	for i := range 20 {
		m := weir.Message{Payload: i}
		if i%4 > 0 {
			m.Key = fmt.Sprintf("k%d%%", i%4)
			m.Headers = map[string]string{"n": strconv.Itoa(i % 3), `"`: "'"}
		}
		messages = append(messages, m)
	}
	produced(t, c, "t", messages...)
	settledAt(t, c, "t", "g")
	bury(t, conn, "g")
	all, err := c.DeadLetters(t.Context(), "t", "g", 0, 100)
	noError(t, err)
	if len(all) != 20 {
		t.Fatalf("%d dead letters, want 20", len(all))
	}
	at := func(id int) time.Time { return time.Date(2026, 1, 1, 0, 0, id, 0, time.UTC) }
	for name, f := range map[string]struct {
		filter weir.DeadFilter
		want   func(d weir.DeadLetter) bool
	}{
		"all":             {weir.DeadFilter{}, func(weir.DeadLetter) bool { return true }},
		"ids":             {weir.DeadFilter{IDs: []int64{17, 3, 3, 99}}, func(d weir.DeadLetter) bool { return d.ID == 3 || d.ID == 17 }},
		"no ids":          {weir.DeadFilter{IDs: []int64{}}, func(weir.DeadLetter) bool { return false }},
		"key":             {weir.DeadFilter{Key: "k1%"}, func(d weir.DeadLetter) bool { return d.Key == "k1%" }},
		"prefix":          {weir.DeadFilter{KeyPrefix: "k"}, func(d weir.DeadLetter) bool { return d.Key != "" }},
		"no pattern":      {weir.DeadFilter{KeyPrefix: "%"}, func(weir.DeadLetter) bool { return false }},
		"header":          {weir.DeadFilter{Headers: map[string]string{"n": "2", `"`: "'"}}, func(d weir.DeadLetter) bool { return d.Headers["n"] == "2" }},
		"error":           {weir.DeadFilter{Error: "refused 1"}, func(d weir.DeadLetter) bool { return strings.HasPrefix(d.Error, "refused 1") }},
		"an error before": {weir.DeadFilter{Error: "first"}, func(weir.DeadLetter) bool { return false }},
		"died after":      {weir.DeadFilter{DiedAfter: at(18)}, func(d weir.DeadLetter) bool { return d.ID >= 18 }},
		"died before":     {weir.DeadFilter{DiedBefore: at(18)}, func(d weir.DeadLetter) bool { return d.ID < 18 }},
		"produced after":  {weir.DeadFilter{ProducedAfter: all[4].ProducedAt}, func(d weir.DeadLetter) bool { return !d.ProducedAt.Before(all[4].ProducedAt) }},
		"produced before": {weir.DeadFilter{ProducedBefore: all[4].ProducedAt}, func(d weir.DeadLetter) bool { return d.ProducedAt.Before(all[4].ProducedAt) }},
		"attempts":        {weir.DeadFilter{MinAttempts: 4}, func(d weir.DeadLetter) bool { return d.Attempt >= 4 }},
		"many": {
			weir.DeadFilter{IDs: []int64{2, 6, 10, 14}, Key: "k1%", MinAttempts: 2, DiedBefore: at(14)},
			func(d weir.DeadLetter) bool { return d.ID == 2 || d.ID == 6 },
		},
	} {
		want := []int64{}
		for _, d := range all {
			if f.want(d) {
				want = append(want, d.ID)
			}
		}
		if got := deadIDs(t, c, f.filter); !slices.Equal(got, want) {
			t.Errorf("%s: listed are %v, want %v", name, got, want)
		}
		for act, do := range map[string]func(*weir.Client) (int64, error){
			"redrive": func(c *weir.Client) (int64, error) {
				return c.RedriveMany(t.Context(), "t", "g", f.filter, &weir.RedriveOptions{Chunk: 3})
			},
			"purge": func(c *weir.Client) (int64, error) {
				return c.PurgeMany(t.Context(), "t", "g", f.filter, &weir.PurgeOptions{Chunk: 3})
			},
		} {
			n, err := do(c)
			noError(t, err)
			left := deadIDs(t, c, weir.DeadFilter{})
			if int(n) != len(want) || len(left) != 20-len(want) || slices.ContainsFunc(left, func(id int64) bool { return slices.Contains(want, id) }) {
				t.Errorf("%s: %s took %d and left %v, want to take %v", name, act, n, left, want)
			}
			execute(t, conn, "delete from weir.delivery")
			bury(t, conn, "g")
		}
	}

	// Pages.
	var paged []int64
	for after := int64(0); ; {
		page, err := c.FindDeadLetters(t.Context(), "t", "g", weir.DeadFilter{KeyPrefix: "k"}, after, 4)
		noError(t, err)
		if len(page) == 0 {
			break
		}
		for _, d := range page {
			paged, after = append(paged, d.ID), d.ID
		}
	}
	if want := deadIDs(t, c, weir.DeadFilter{KeyPrefix: "k"}); !slices.Equal(paged, want) {
		t.Errorf("pages have %v, want %v", paged, want)
	}

	// What a filter cannot have is refused, and nothing is done.
	for filter, says := range map[string]string{
		`{"keys": 1, "erorr": "x"}`: `'erorr', 'keys'.*It can have: ids, key, key_prefix`,
		`[]`:                        `filter is \[\], it must be a JSON object`,
		`{"ids": 7}`:                `7 for ids`,
		`{"ids": [1.5]}`:            `\[1\.5\] for ids`,
		`{"ids": ["1"]}`:            `for ids`,
		`{"ids": [0]}`:              `for ids`,
		`{"key": 7}`:                `7 for key, it must be a text`,
		`{"key_prefix": {}}`:        `for key_prefix`,
		`{"headers": []}`:           `for headers, it must be a JSON object`,
		`{"error": 1}`:              `for error`,
		`{"died_after": "someday"}`: `"someday" for died_after, it must be a time`,
		`{"produced_before": 7}`:    `for produced_before`,
		`{"min_attempts": -1}`:      `-1 for min_attempts, it must be a whole number`,
		`{"min_attempts": 1.5}`:     `for min_attempts`,
	} {
		for _, call := range []string{
			"select count(*) from weir.dead_letters_matching('t', 'g', $1::text::jsonb)",
			"select weir.redrive('t', 'g', filter => $1::text::jsonb)", "select weir.purge('t', 'g', filter => $1::text::jsonb)",
		} {
			_, err := conn.Exec(t.Context(), call, filter)
			if text := state(err); !regexp.MustCompile(`^WE003 .*` + says).MatchString(text) {
				t.Errorf("%s with %s: %s", call, filter, text)
			}
		}
	}
	for name, err := range map[string]error{
		"a key with NUL":    second(c.RedriveMany(t.Context(), "t", "g", weir.DeadFilter{Key: "a\x00"}, nil)),
		"an error not UTF8": second(c.PurgeMany(t.Context(), "t", "g", weir.DeadFilter{Error: "\xff"}, nil)),
		"a header with NUL": second(c.FindDeadLetters(t.Context(), "t", "g", weir.DeadFilter{Headers: map[string]string{"a": "\x00"}}, 0, 1)),
		"negative attempts": second(c.PurgeMany(t.Context(), "t", "g", weir.DeadFilter{MinAttempts: -1}, nil)),
		"a negative id":     second(c.Redrive(t.Context(), "t", "g", -1)),
		"a negative chunk":  second(c.RedriveMany(t.Context(), "t", "g", weir.DeadFilter{}, &weir.RedriveOptions{Chunk: -1})),
		"a large chunk":     second(c.PurgeMany(t.Context(), "t", "g", weir.DeadFilter{}, &weir.PurgeOptions{Chunk: 1_000_001})),
		"an empty page":     second(c.DeadLetters(t.Context(), "t", "g", 0, 0)),
		"a large page":      second(c.DeadLetters(t.Context(), "t", "g", 0, 10_001)),
	} {
		if !errors.Is(err, weir.ErrInvalid) {
			t.Errorf("%s: error is %v, want ErrInvalid", name, err)
		}
	}
	wantError(t, second(c.RedriveMany(t.Context(), "t", "missing", weir.DeadFilter{}, nil)), weir.ErrGroupNotFound, "missing")
	wantError(t, second(c.PurgeMany(t.Context(), "missing", "g", weir.DeadFilter{}, nil)), weir.ErrTopicNotFound, "missing")
	if left := deadIDs(t, c, weir.DeadFilter{}); len(left) != 20 {
		t.Errorf("%d dead letters are left after refused calls, want 20", len(left))
	}
}

// state is an error of the server, with its SQLSTATE and hint.
func state(err error) string {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return fmt.Sprint(err)
	}
	return fmt.Sprintf("%s %s %s", pg.Code, pg.Message, pg.Hint)
}

// A redrive takes many transactions, tells how far it is, and goes on after an interrupt.
func TestRedriveInChunks(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	conn := connect(t, dsn)
	produced(t, c, "t", numbers(25)...)
	settledAt(t, c, "t", "g")
	bury(t, conn, "g")
	ctx, cancel := context.WithCancel(t.Context())
	var seen []int64
	n, err := c.RedriveMany(ctx, "t", "g", weir.DeadFilter{}, &weir.RedriveOptions{Chunk: 4, Progress: func(done int64) {
		seen = append(seen, done)
		if done == 12 {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) || n != 12 || !slices.Equal(seen, []int64{4, 8, 12}) {
		t.Errorf("interrupted after %d, at %v, with %v", n, seen, err)
	}
	if g := group(t, c, "t", "g"); g.Dead != 13 || g.Retrying != 12 {
		t.Errorf("group is %+v, want 13 dead and 12 to be tried", g)
	}
	// The sum is that of all, also where the last chunk is a full one.
	seen = nil
	n, err = c.PurgeMany(t.Context(), "t", "g", weir.DeadFilter{}, &weir.PurgeOptions{Chunk: 13, Progress: func(done int64) { seen = append(seen, done) }})
	if err != nil || n != 13 || !slices.Equal(seen, []int64{13}) {
		t.Errorf("purged %d, at %v, with %v", n, seen, err)
	}
	// Attempts count from none, the errors are kept.
	for _, row := range column[string](t, conn, `select concat_ws(' ', state, attempt, suspect, due_at <= clock_timestamp(), jsonb_array_length(errors)) from weir.delivery`) {
		if row != "ready 0 f t 2" {
			t.Errorf("a redriven message is %q", row)
		}
	}
	y := newTally()
	consume(t, c, "t", "g", diesOf(y, func(m *weir.Received[int]) bool {
		if m.Attempt != 1 {
			t.Errorf("message %d comes in attempt %d", m.ID, m.Attempt)
		}
		return false
	}), nil)
	drained(t, c, "t", "g")
	if y.calls() != 12 || y.distinct() != 12 {
		t.Errorf("%d messages handled in %d calls, want 12", y.distinct(), y.calls())
	}
	execute(t, conn, "delete from weir.delivery")
	bury(t, conn, "g")
	if n := value[int64](t, conn, "select weir.redrive('t', 'g', max_messages => 10)"); n != 10 {
		t.Errorf("redrove %d, want 10", n)
	}
	if got := deadIDs(t, c, weir.DeadFilter{}); len(got) != 15 || got[0] != 11 {
		t.Errorf("left are %v, want those from 11 on", got)
	}
}

// To another topic: a new message with what the old one had and where it comes from, and no dead letter any more; both or neither.
func TestRedriveToTopic(t *testing.T) {
	t.Parallel()
	for _, formats := range [][2]weir.Format{{weir.JSON, weir.JSON}, {weir.JSON, weir.JSONB}, {weir.JSONB, weir.JSON}, {weir.Bytes, weir.Bytes}} {
		t.Run(fmt.Sprintf("%s to %s", formats[0], formats[1]), func(t *testing.T) {
			t.Parallel()
			c, _ := open(t, nil)
			topicAndGroup(t, c, "t", "g", &weir.TopicOptions{Format: formats[0]}, nil)
			noError(t, c.CreateTopic(t.Context(), "u", &weir.TopicOptions{Format: formats[1]}))
			var messages []weir.Message
			for i := range 30 {
				payload := fmt.Sprintf(`{"n": %d}`, i)
				if formats[0] == weir.Bytes {
					payload = fmt.Sprintf("\xff\x00%d", i)
				}
				m := weir.Message{Payload: []byte(payload)}
				if i%2 == 0 {
					m.Key, m.Headers = fmt.Sprint("k", i), map[string]string{"h": fmt.Sprint(i), "weir-dead-id": "former"}
				}
				messages = append(messages, m)
			}
			ids := produced(t, c, "t", messages...)
			k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[[]byte]) error {
				return weir.Dead(fmt.Errorf("no %d", m.ID))
			}), nil)
			drained(t, c, "t", "g")
			k.stop()
			n, err := c.RedriveMany(t.Context(), "t", "g", weir.DeadFilter{}, &weir.RedriveOptions{To: "u", Chunk: 7})
			if err != nil || n != 30 {
				t.Fatalf("redrove %d, %v", n, err)
			}
			if g := group(t, c, "t", "g"); g.Dead != 0 || g.Retrying != 0 || g.Lag != 0 {
				t.Errorf("group is %+v, want nothing left", g)
			}
			got := stored(t, c, "u")
			if len(got) != 30 {
				t.Fatalf("%d messages came, want 30", len(got))
			}
			for i, m := range got {
				want := map[string]string{
					"weir-dead-topic": "t", "weir-dead-group": "g", "weir-dead-id": fmt.Sprint(ids[i]), "weir-dead-attempts": "1",
					"weir-dead-error": fmt.Sprintf("no %d", ids[i]),
				}
				if i%2 == 0 {
					want["h"] = fmt.Sprint(i)
				}
				if m.Key != messages[i].Key || string(m.Raw) != string(messages[i].Payload.([]byte)) || !maps.Equal(m.Headers, want) {
					t.Errorf("message %d is %q, key %q, headers %v", i, m.Raw, m.Key, m.Headers)
				}
			}
			if n, err := c.RedriveMany(t.Context(), "t", "g", weir.DeadFilter{}, &weir.RedriveOptions{To: "u"}); err != nil || n != 0 {
				t.Errorf("again: %d, %v", n, err)
			}
		})
	}

	t.Run("refused", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, nil)
		topicAndGroup(t, c, "t", "g", nil, nil)
		noError(t, c.CreateTopic(t.Context(), "bytes", &weir.TopicOptions{Format: weir.Bytes}))
		noError(t, c.CreateTopic(t.Context(), "parsed", &weir.TopicOptions{Format: weir.JSONB}))
		topicAndGroup(t, c, "bytes", "b", nil, nil)
		produced(t, c, "t", weir.Message{Payload: 1}, weir.Message{Payload: json.RawMessage(`"\u0000"`)}, weir.Message{Payload: 3})
		settledAt(t, c, "t", "g")
		conn := connect(t, dsn)
		bury(t, conn, "g")
		redrive := func(to string) error {
			return second(c.RedriveMany(t.Context(), "t", "g", weir.DeadFilter{}, &weir.RedriveOptions{To: to}))
		}
		wantError(t, redrive("bytes"), weir.ErrFormat, `'t', which has format json`, `'bytes', which has format bytes`, "format json or jsonb")
		wantError(t, second(c.RedriveMany(t.Context(), "bytes", "b", weir.DeadFilter{}, &weir.RedriveOptions{To: "t"})), weir.ErrFormat, "format bytes")
		wantError(t, redrive("missing"), weir.ErrTopicNotFound, "missing")
		wantError(t, redrive("parsed"), weir.ErrFormat, "dead letter 2 does not fit topic 'parsed'", `\u0000`)
		if n := len(stored(t, c, "parsed")); n != 0 || len(deadIDs(t, c, weir.DeadFilter{})) != 3 {
			t.Errorf("refused, and %d messages were produced", n)
		}
		// A transaction that rolls back leaves the dead letters and no messages.
		tx := start(t, conn)
		if n := value[int](t, tx, "select weir.redrive('t', 'g', to_topic => 't', filter => '{\"ids\": [1, 3]}')::int"); n != 2 {
			t.Errorf("redrove %d, want 2", n)
		}
		noError(t, tx.Rollback(t.Context()))
		if len(deadIDs(t, c, weir.DeadFilter{})) != 3 || len(stored(t, c, "t")) != 3 {
			t.Error("a redrive that was rolled back left something")
		}
	})
}

// Of an ordered group, what is redriven takes its place in its key: it is handled before what comes later of it, once, and not
// beside another of it.
func TestRedriveOrdered(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Ordered, Shards: 2, RetryDelay: time.Hour})
	conn := connect(t, dsn)
	produced(t, c, "t", keyed(3, 6)...) // ids 1 to 18, key k0 has 1, 4, 7, ...
	k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		switch {
		case m.Key == "k0" && (m.Value == 1 || m.Value == 3):
			return weir.Dead(errors.New("no"))
		case m.Key == "k0" && m.Value == 4:
			return errors.New("later") // in an hour; 5 waits behind it
		}
		return nil
	}), nil)
	eventually(t, "two are dead and two wait", func() bool {
		g := group(t, c, "t", "g")
		return g.Dead == 2 && g.Retrying == 1 && g.Waiting == 1 && g.Lag == 0 && g.Leases == 0
	})
	k.stop()
	states := func() string {
		return strings.Join(column[string](t, conn, "select format('%s %s', message_id, state) from weir.delivery order by message_id"), ", ")
	}
	if got := states(); got != "4 dead, 10 dead, 13 ready, 16 parked" {
		t.Fatalf("deliveries are %s", got)
	}
	if n, err := c.Redrive(t.Context(), "t", "g", 10); n != 1 || err != nil {
		t.Errorf("redrove %d, %v", n, err)
	}
	if got := states(); got != "4 dead, 10 ready, 13 parked, 16 parked" {
		t.Errorf("after the redrive of 10 the deliveries are %s", got)
	}
	if n, err := c.Redrive(t.Context(), "t", "g", 0); n != 1 || err != nil {
		t.Errorf("redrove %d, %v", n, err)
	}
	if got := states(); got != "4 ready, 10 parked, 13 parked, 16 parked" {
		t.Errorf("after the redrive of 4 the deliveries are %s", got)
	}
	execute(t, conn, "update weir.delivery set due_at = clock_timestamp()")
	produced(t, c, "t", weir.Message{Key: "k0", Payload: 6})
	var (
		mu    sync.Mutex
		order []int
	)
	consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		mu.Lock()
		defer mu.Unlock()
		order = append(order, m.Value)
		return nil
	}), &weir.ConsumerOptions{Concurrency: 4})
	drained(t, c, "t", "g")
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(order, []int{1, 3, 4, 5, 6}) {
		t.Errorf("handled in the order %v", order)
	}
}

// An acknowledgement and a redrive of one key at once: whichever commits first, what is left of the key is not parked behind nothing.
func TestRedriveWhileItsKeyIsAcknowledged(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"redrive", "ack"} {
		t.Run(first+" first", func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Ordered, Shards: 1, RetryDelay: -1})
			produced(t, c, "t", weir.Message{Key: "k", Payload: 1}, weir.Message{Key: "k", Payload: 2})
			a, b := connect(t, dsn), connect(t, dsn)
			lease := claimOne(t, a, "t", "g", "a", 1, "1 min")
			execute(t, a, "select weir.fail($1, 'a', 1, 'no')", lease.ID)
			execute(t, a, "select weir.ack($1, 'a')", lease.ID)
			lease = claimOne(t, a, "t", "g", "a", 10, "1 min") // the retry of 1, behind which 2 is parked
			if state := value[string](t, a, "select string_agg(message_id || ' ' || state, ', ' order by message_id) from weir.delivery"); state != "1 ready, 2 parked" && state != "1 ready" {
				t.Fatalf("deliveries are %s", state)
			}
			execute(t, a, "insert into weir.delivery (group_id, message_id, state, due_at, attempt, shard, key, payload, produced_at, errors) "+
				"select group_id, 3, 'dead', clock_timestamp(), 1, 0, 'k', '3', clock_timestamp(), '[{\"attempt\": 1, \"error\": \"no\", \"at\": \"2026-01-01T00:00:00Z\"}]' from weir.lease")
			execute(t, a, "update weir.cursor set claimed = 3")
			execute(t, a, "update weir.fence set settled = 3, head = 3")
			execute(t, a, "select setval('weir.log_1_id', 3)")

			tx := start(t, a)
			blocked := make(chan error, 1)
			pid := b.PgConn().PID()
			if first == "redrive" {
				execute(t, tx, "select weir.redrive('t', 'g', 3)")
				go func() { blocked <- second(b.Exec(context.Background(), "select weir.ack($1, 'a')", lease.ID)) }()
			} else {
				execute(t, tx, "select weir.ack($1, 'a')", lease.ID)
				go func() { blocked <- second(b.Exec(context.Background(), "select weir.redrive('t', 'g', 3)")) }()
			}
			watch := connect(t, dsn)
			eventually(t, "the other one waits", func() bool {
				return value[bool](t, watch, "select cardinality(pg_blocking_pids($1)) > 0", pid)
			})
			noError(t, tx.Commit(t.Context()))
			noError(t, <-blocked)
			if n := value[int](t, watch, "select count(*)::int from weir.delivery where state = 'ready' and message_id = (select min(message_id) from weir.delivery)"); n != 1 {
				t.Errorf("nothing of the key is ready: %v", column[string](t, watch, "select message_id || ' ' || state from weir.delivery"))
			}
		})
	}
}

// A group that was moved back comes by its dead letters again: a redrive does not have them handled twice.
func TestRedriveAfterSeek(t *testing.T) {
	t.Parallel()
	for _, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, nil)
			topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: mode})
			conn := connect(t, dsn)
			ids := produced(t, c, "t", keyed(4, 10)...)
			y := newTally()
			k := consume(t, c, "t", "g", diesOf(y, func(m *weir.Received[int]) bool { return m.ID%10 == 5 }), nil)
			drained(t, c, "t", "g")
			k.stop()
			if got := deadIDs(t, c, weir.DeadFilter{}); !slices.Equal(got, []int64{5, 15, 25, 35}) {
				t.Fatalf("dead are %v", got)
			}
			_, err := c.Seek(t.Context(), "t", "g", weir.AtID(21))
			noError(t, err)
			// 25 is claimed again and in hand, 35 is claimed or still to come; 5 and 15 lie behind. A queue group has had its
			// deliveries made anew by then, dead ones too.
			list := claim(t, conn, "t", "g", "other", 6, "1 min")
			dead := len(deadIDs(t, c, weir.DeadFilter{}))
			if n, err := c.Redrive(t.Context(), "t", "g", 0); n != int64(dead) || dead != 4 && mode != weir.Queue || err != nil {
				t.Errorf("redrove %d, %v", n, err)
			}
			for _, l := range list {
				if !value[bool](t, conn, "select weir.release($1, 'other')", l.ID) {
					t.Error("a lease was lost")
				}
			}
			y = newTally()
			consume(t, c, "t", "g", diesOf(y, func(*weir.Received[int]) bool { return false }), nil)
			drained(t, c, "t", "g")
			want := append([]int64{5, 15}, ids[20:]...)
			if missing := y.missing(want); len(missing) > 0 || y.calls() != len(want) {
				t.Errorf("%d messages handled in %d calls, missing are %v", y.distinct(), y.calls(), missing)
			}
		})
	}
}

// Several redrives and purges of one group at once handle each dead letter once, all of them, and end.
func TestRedrivesAtOnce(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Ordered})
	conn := connect(t, dsn)
	produced(t, c, "t", keyed(50, 40)...)
	settledAt(t, c, "t", "g")
	bury(t, conn, "g")
	var all sync.WaitGroup
	results := make([]int64, 6)
	for i := range results {
		all.Go(func() {
			var err error
			switch i % 3 {
			case 0:
				results[i], err = c.RedriveMany(context.Background(), "t", "g", weir.DeadFilter{}, &weir.RedriveOptions{Chunk: 50})
			case 1:
				results[i], err = c.RedriveMany(context.Background(), "t", "g", weir.DeadFilter{}, &weir.RedriveOptions{Chunk: 70, To: "t"})
			default:
				results[i], err = c.PurgeMany(context.Background(), "t", "g", weir.DeadFilter{}, &weir.PurgeOptions{Chunk: 30})
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	var sum int64
	for _, n := range results {
		sum += n
	}
	if g := group(t, c, "t", "g"); sum != 2000 || g.Dead != 0 || int64(g.Retrying) != results[0]+results[3] || g.Head != 2000+results[1]+results[4] {
		t.Errorf("%v were done, group is %+v; want 2000 in sum and none dead", results, g)
	}
	y := newTally()
	consume(t, c, "t", "g", diesOf(y, func(*weir.Received[int]) bool { return false }), &weir.ConsumerOptions{Concurrency: 8})
	drained(t, c, "t", "g")
	if want := int(results[0] + results[3] + results[1] + results[4]); y.calls() != want || y.distinct() != want {
		t.Errorf("%d messages handled in %d calls, want %d", y.distinct(), y.calls(), want)
	}
}

// With 50,000 dead letters and as many retries, a page, one of them and a redrive or purge of one touch a few dozen pages, whether the
// tables were ever analyzed or not.
func TestDeadLettersCost(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	conn := connect(t, dsn)
	topicAndGroup(t, c, "t", "g", nil, &weir.GroupOptions{Mode: weir.Ordered, Shards: 4})
	execute(t, conn, "alter table weir.delivery set (autovacuum_enabled = off)")
	execute(t, conn, "insert into weir.log_1 (key, payload) select 'k' || i, to_json(i) from generate_series(1, 50000) as i")
	settledAt(t, c, "t", "g")
	bury(t, conn, "g")
	execute(t, conn, `
		insert into weir.delivery (group_id, message_id, state, due_at, attempt, shard, key, payload, produced_at, errors)
		select group_id, message_id - 50000, 'ready', clock_timestamp() + interval '1 day', 1, shard, 'r' || message_id, payload, produced_at, errors from weir.delivery`)
	buffers := func(call string) int {
		t.Helper()
		tx, err := conn.Begin(t.Context())
		noError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		execute(t, tx, call) // once without, for the catalogues
		var plan string
		noError(t, tx.QueryRow(t.Context(), "explain (analyze, buffers, costs off, timing off, format json) "+strings.Replace(call, "40000", "41000", 1)).Scan(&plan))
		var parsed []struct {
			Plan map[string]any
		}
		noError(t, json.Unmarshal([]byte(plan), &parsed))
		return int(parsed[0].Plan["Shared Hit Blocks"].(float64) + parsed[0].Plan["Shared Read Blocks"].(float64))
	}
	for _, analyzed := range []bool{false, true} {
		if analyzed {
			execute(t, conn, "analyze weir.delivery")
		}
		for call, most := range map[string]int{
			"select * from weir.dead_letters_matching('t', 'g', null, 25000, 100)":                    500,
			"select * from weir.dead_letters_matching('t', 'g', '{\"ids\": [40000]}')":                30,
			"select * from weir.dead_letters_matching('t', 'g', '{\"key_prefix\": \"k\"}', 40000, 5)": 60,
			"select weir.redrive('t', 'g', 40000)":                                                    150,
			"select weir.purge('t', 'g', 40000)":                                                      60,
			"select * from weir.redrive_part('t', 'g', null, null, null, 40000, 10)":                  900,
		} {
			n := buffers(call)
			t.Logf("analyzed %v, %s: %d pages", analyzed, call, n)
			if n > most {
				t.Errorf("analyzed %v, %s: %d pages, want at most %d", analyzed, call, n, most)
			}
		}
	}
}
