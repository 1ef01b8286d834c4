package weir_test

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

// A thousand messages with ten duplicate keys among them, by every way: 990 are stored, there is a result for each, and the
// caller's transaction goes on.
func TestDuplicateKeys(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	conn := connect(t, dsn)
	messages := numbers(1000)
	var keys []string
	for i := range messages {
		key := i
		if i%100 == 99 { // of the message 50 before
			key = i - 50
		}
		messages[i].IdempotencyKey = fmt.Sprintf("order %d", key)
		keys = append(keys, messages[i].IdempotencyKey)
	}
	texts := make([]string, len(messages))
	for i := range texts {
		texts[i] = fmt.Sprint(i + 1)
	}
	verify := func(how string, results []weir.Produced, again bool) {
		t.Helper()
		if len(results) != len(messages) {
			t.Errorf("%s: %d results, want %d", how, len(results), len(messages))
			return
		}
		topic := value[int](t, conn, "select id from weir.topic where name = $1", how)
		values := column[string](t, conn, fmt.Sprintf("select payload::text from weir.log_%d order by id", topic))
		if len(values) != 990 {
			t.Errorf("%s: %d are stored, want 990", how, len(values))
		}
		for i, r := range results {
			want, of := again || i%100 == 99, i+1
			if i%100 == 99 {
				of = i + 1 - 50
			}
			stored := value[string](t, conn, fmt.Sprintf("select payload::text from weir.log_%d where id = $1", topic), r.ID)
			if r.Duplicate != want || stored != fmt.Sprint(of) {
				t.Errorf("%s: result %d is %+v with payload %s, want duplicate %v of %d", how, i, r, stored, want, of)
				return
			}
		}
	}
	ways := map[string]func(t *testing.T, topic string) []weir.Produced{
		"Produce": func(t *testing.T, topic string) []weir.Produced {
			results, err := c.Produce(t.Context(), topic, messages...)
			noError(t, err)
			return results
		},
		"ProduceTx": func(t *testing.T, topic string) (results []weir.Produced) {
			noError(t, inTx(t, dsn, true, func(tx pgx.Tx) (err error) {
				if results, err = c.ProduceTx(t.Context(), tx, topic, messages...); err == nil {
					execute(t, tx, "create table if not exists alive (how text); insert into alive values ('pgx')")
				}
				return err
			}))
			return results
		},
		"ProduceSQL": func(t *testing.T, topic string) []weir.Produced {
			db, err := sql.Open("pgx", dsn)
			noError(t, err)
			defer db.Close()
			tx, err := db.BeginTx(t.Context(), nil)
			noError(t, err)
			defer tx.Rollback()
			results, err := c.ProduceSQL(t.Context(), tx, topic, messages...)
			noError(t, err)
			_, err = tx.ExecContext(t.Context(), "create table if not exists alive (how text)")
			noError(t, err)
			_, err = tx.ExecContext(t.Context(), "insert into alive values ('database/sql')")
			noError(t, err)
			noError(t, tx.Commit())
			return results
		},
		"SQL": func(t *testing.T, topic string) (results []weir.Produced) {
			before := value[int64](t, conn, "select coalesce(max(id), 0) from weir.log_"+fmt.Sprint(value[int](t, conn, "select id from weir.topic where name = $1", topic)))
			tx := start(t, conn)
			ids := column[int64](t, tx, "select weir.produce_many($1, $2::text[]::json[], idempotency_keys => $3)", topic, texts, keys)
			execute(t, tx, "create table if not exists alive (how text)")
			execute(t, tx, "insert into alive values ('plain')")
			noError(t, tx.Commit(t.Context()))
			seen := map[int64]bool{}
			for _, id := range ids {
				results = append(results, weir.Produced{ID: id, Duplicate: id <= before || seen[id]})
				seen[id] = true
			}
			return results
		},
	}
	for how, produce := range ways {
		noError(t, c.CreateTopic(t.Context(), how, nil))
		verify(how, produce(t, how), false)
		verify(how, produce(t, how), true)
	}
	if n := value[int](t, conn, "select count(*)::int from alive"); n != 6 {
		t.Errorf("%d of the callers' transactions went on, want 6", n)
	}
	// Copy has no results, but counts.
	noError(t, c.CreateTopic(t.Context(), "Copy", nil))
	for _, want := range []int64{990, 0} {
		if n, err := c.Copy(t.Context(), "Copy", sequence(messages)); err != nil || n != want {
			t.Errorf("Copy stored %d, %v; want %d", n, err, want)
		}
	}
	// Single ones, from SQL, of every format. Topics have nothing to do with each other.
	noError(t, c.CreateTopic(t.Context(), "bytes", &weir.TopicOptions{Format: weir.Bytes}))
	for range 2 {
		if id := value[int64](t, conn, "select weir.produce('SQL', '0', idempotency_key => 'order 0')"); id != 1 {
			t.Errorf("weir.produce gives id %d, want 1", id)
		}
		if id := value[int64](t, conn, "select weir.produce_bytes('bytes', '\\x00', idempotency_key => 'order 0')"); id != 1 {
			t.Errorf("weir.produce_bytes gives id %d, want 1", id)
		}
	}
	// With its topic its keys are gone.
	dropped, err := c.DropTopic(t.Context(), "bytes", nil)
	if err != nil || !dropped {
		t.Errorf("drop topic: %v, %v", dropped, err)
	}
	if n := value[int](t, conn, "select count(*)::int from weir.idempotency where topic_id not in (select id from weir.topic)"); n != 0 {
		t.Errorf("%d keys of a dropped topic are left", n)
	}
}

// A duplicate whose first is in flight waits for it: where that commits it gets its id, where it rolls back it is stored.
func TestDuplicateInFlight(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	watch := connect(t, dsn)
	for _, commits := range []bool{true, false} {
		first, second := connect(t, dsn), connect(t, dsn)
		key := fmt.Sprint("key ", commits)
		tx := start(t, first)
		ids, err := c.ProduceTx(t.Context(), tx, "t", weir.Message{Payload: 1, IdempotencyKey: key})
		noError(t, err)
		var (
			results []weir.Produced
			failed  error
			done    = make(chan struct{})
		)
		other := start(t, second)
		go func() {
			defer close(done)
			results, failed = c.ProduceTx(t.Context(), other, "t",
				weir.Message{Payload: 2}, weir.Message{Payload: 3, IdempotencyKey: key}, weir.Message{Payload: 4, IdempotencyKey: key})
		}()
		eventually(t, "the second waits for the first", func() bool {
			return value[bool](t, watch, "select $1::int = any (pg_blocking_pids($2::int))", first.PgConn().PID(), second.PgConn().PID())
		})
		if commits {
			noError(t, tx.Commit(t.Context()))
		} else {
			noError(t, tx.Rollback(t.Context()))
		}
		<-done
		noError(t, failed)
		noError(t, other.Commit(t.Context()))
		switch {
		case results[0].Duplicate, !results[2].Duplicate, results[1].ID != results[2].ID:
			t.Errorf("first commits: %v: results are %+v", commits, results)
		case commits && (results[1] != weir.Produced{ID: ids[0].ID, Duplicate: true}):
			t.Errorf("the first committed as %d: %+v", ids[0].ID, results[1])
		case !commits && (results[1].Duplicate || results[1].ID == ids[0].ID):
			t.Errorf("the first rolled back: %+v", results[1])
		}
	}
	if got := column[string](t, watch, "select payload::text from weir.log_1 order by id"); !slices.Equal(got, []string{"1", "2", "2", "3"}) {
		t.Errorf("stored %v", got)
	}
}

// Calls with the same keys in different orders wait for each other, but never in a circle.
func TestDuplicateKeysInAnyOrder(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	watch := connect(t, dsn)
	forward := make([]weir.Message, 50)
	for i := range forward {
		forward[i] = weir.Message{Payload: i, IdempotencyKey: fmt.Sprint("key ", i)}
	}
	backward := slices.Clone(forward)
	slices.Reverse(backward)

	// The first call is stopped before its last key; the second, the other way round, must stop at its first.
	blocker := start(t, connect(t, dsn))
	_, err := c.ProduceTx(t.Context(), blocker, "t", weir.Message{Payload: 0, IdempotencyKey: "key 25"})
	noError(t, err)
	conns := []*pgx.Conn{connect(t, dsn), connect(t, dsn)}
	ended := make(chan error, 2)
	for i, messages := range [][]weir.Message{forward, backward} {
		tx := start(t, conns[i])
		go func() {
			_, err := c.ProduceTx(t.Context(), tx, "t", messages...)
			if err == nil {
				err = tx.Commit(t.Context())
			}
			ended <- err
		}()
		eventually(t, "it waits", func() bool {
			return value[bool](t, watch, "select cardinality(pg_blocking_pids($1::int)) > 0", conns[i].PgConn().PID())
		})
	}
	noError(t, blocker.Rollback(t.Context()))
	for range 2 {
		noError(t, <-ended)
	}
	if n := value[int](t, watch, "select count(*)::int from weir.log_1"); n != 50 {
		t.Errorf("%d are stored, want 50", n)
	}
	if n := value[int](t, watch, "select deadlocks::int from pg_stat_database where datname = current_database()"); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
}

// A key is remembered for the topic's idempotency_ttl, from the message that was stored.
func TestIdempotencyKeyExpires(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{IdempotencyTTL: 90 * time.Minute}))
	conn := connect(t, dsn)
	produce := func() weir.Produced {
		t.Helper()
		results, err := c.Produce(t.Context(), "t", weir.Message{Payload: 1, IdempotencyKey: "k"})
		noError(t, err)
		return results[0]
	}
	expire := func(in string) {
		t.Helper()
		execute(t, conn, "update weir.idempotency set expires_at = clock_timestamp() + $1::text::interval", in)
	}
	first := produce()
	left := value[float64](t, conn, "select extract(epoch from expires_at - clock_timestamp())::float8 from weir.idempotency")
	if left < 5390 || left > 5400 {
		t.Errorf("it is remembered for %v more seconds, want 5400", left)
	}
	if again := produce(); !again.Duplicate || again.ID != first.ID {
		t.Errorf("again: %+v, the first was %+v", again, first)
	}
	expire("1 s") // not yet
	if again := produce(); !again.Duplicate {
		t.Errorf("before it expires: %+v", again)
	}
	expire("-1 ms")
	anew := produce()
	if anew.Duplicate || anew.ID <= first.ID {
		t.Errorf("after it has expired: %+v", anew)
	}
	if again := produce(); !again.Duplicate || again.ID != anew.ID {
		t.Errorf("again: %+v, the message is %+v", again, anew)
	}
	for _, ttl := range []time.Duration{-1, time.Millisecond, 366 * 24 * time.Hour} {
		wantError(t, c.CreateTopic(t.Context(), "u", &weir.TopicOptions{IdempotencyTTL: ttl}), weir.ErrInvalid, "IdempotencyTTL")
	}
	for _, ttl := range []string{`"0 s"`, `"366 days"`, `"soon"`, `true`} {
		_, err := conn.Exec(t.Context(), `select weir.create_topic('u', '{"idempotency_ttl": `+ttl+`}')`)
		if err == nil || !strings.Contains(err.Error(), "idempotency_ttl") {
			t.Errorf("idempotency_ttl %s: %v", ttl, err)
		}
	}
}
