package weir_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

// marked are messages that a wire recognises, each with a payload of its own.
func marked(name string, n int) []weir.Message {
	messages := make([]weir.Message, n)
	for i := range messages {
		messages[i].Payload = fmt.Sprintf("marked %s %d", name, i)
	}
	return messages
}

// storedAs demands that a topic holds the messages that were reported as produced, each once, under the ids that were reported,
// and nothing else.
func storedAs(t *testing.T, conn querier, reported map[int64]string) {
	t.Helper()
	rows, err := conn.Query(t.Context(), "select id, payload #>> '{}' from weir.log_1 order by id")
	noError(t, err)
	var (
		id   int64
		text string
		seen = map[string]int64{}
	)
	_, err = pgx.ForEachRow(rows, []any{&id, &text}, func() error {
		if other, twice := seen[text]; twice {
			t.Errorf("%q is stored twice, as %d and %d", text, other, id)
		}
		seen[text] = id
		if reported[id] != text {
			t.Errorf("message %d is %q, it was reported as %q", id, text, reported[id])
		}
		return nil
	})
	noError(t, err)
	for id, text := range reported {
		if seen[text] != id {
			t.Errorf("%q was reported as %d, and is %d", text, id, seen[text])
		}
	}
}

// Connections are cut before the request, at it, after the commit, and within the answer, most attempts of each call: it stores
// once, and gives the right ids.
func TestProduceThroughCuts(t *testing.T) {
	t.Parallel()
	admin, dsn := open(t, nil)
	noError(t, admin.CreateTopic(t.Context(), "t", nil))
	for _, what := range []fault{cutBefore, cutAtOnce, cutAfter, cutWithin} {
		w := newWire(t, dsn)
		c := openDSN(t, w.dsn, &weir.Options{NoListen: true})
		rng := rand.New(rand.NewPCG(uint64(what), 1))
		var cuts atomic.Int64
		w.set(isMarked, func() fault {
			if w.within = 1 + rng.IntN(300); rng.IntN(5) < 2 {
				return pass
			}
			cuts.Add(1)
			return what
		})
		var (
			mu       sync.Mutex
			reported = map[int64]string{}
			work     sync.WaitGroup
		)
		for worker := range 3 {
			work.Go(func() {
				for i := range 24 {
					messages := marked(fmt.Sprint(worker, i), 1+i%4)
					produced, err := c.Produce(t.Context(), "t", messages...)
					if err != nil {
						t.Errorf("fault %d: %v", what, err)
						continue
					}
					mu.Lock()
					for j, p := range produced {
						if p.Duplicate {
							t.Errorf("fault %d: message %d is a duplicate", what, p.ID)
						}
						reported[p.ID] = messages[j].Payload.(string)
					}
					mu.Unlock()
				}
			})
		}
		work.Wait()
		if cuts.Load() < 12 { // concurrent calls share attempts
			t.Errorf("fault %d: only %d attempts were cut", what, cuts.Load())
		}
		conn := connect(t, dsn)
		// What was sent may still be under way on connections that were cut; it must come to nothing.
		eventually(t, "nothing is under way", func() bool {
			return value[int](t, conn, "select count(*)::int from pg_stat_activity where datname = current_database() and state = 'active' and pid <> pg_backend_pid()") == 0
		})
		storedAs(t, conn, reported)
		execute(t, conn, "truncate weir.log_1")
	}
}

// The first attempt reaches the server after the repetition of it was stored.
func TestLateAttempt(t *testing.T) {
	t.Parallel()
	admin, dsn := open(t, nil)
	noError(t, admin.CreateTopic(t.Context(), "t", nil))
	conn := connect(t, dsn)
	w := newWire(t, dsn)
	c := openDSN(t, w.dsn, &weir.Options{NoListen: true})
	// first holds the first attempt of the next call; then runs before the second.
	first := func(then func()) {
		n := 0
		w.set(isMarked, func() fault {
			if n++; n == 1 {
				return hold
			}
			if n == 2 && then != nil {
				then()
			}
			return pass
		})
	}
	reported := map[int64]string{}
	produce := func(name string) []weir.Produced {
		t.Helper()
		messages := marked(name, 2)
		produced, err := c.Produce(t.Context(), "t", messages...)
		noError(t, err)
		for i, p := range produced {
			reported[p.ID] = messages[i].Payload.(string)
		}
		return produced
	}

	first(nil)
	produce("one")
	if answer := w.release(); strings.Contains(answer, "WE") || !strings.Contains(answer, "SELECT 2") {
		t.Errorf("the late attempt of the last batch is answered with %q, want its two ids", answer)
	}
	storedAs(t, conn, reported)

	first(nil)
	produce("two")
	produce("three") // by the same producer
	if answer := w.release(); !strings.Contains(answer, "WE009") {
		t.Errorf("the late attempt of an earlier batch is answered with %q, want WE009", answer)
	}
	storedAs(t, conn, reported)

	// Refused the second time: that is the outcome, and the first attempt does not change it.
	first(func() {
		execute(t, conn, "alter table weir.log_1 add constraint refusing check (payload #>> '{}' !~ 'refused') not valid")
	})
	_, err := c.Produce(t.Context(), "t", marked("refused", 2)...)
	if err == nil || errors.Is(err, weir.ErrUnknownOutcome) || !strings.Contains(err.Error(), "refusing") {
		t.Errorf("error is %v, want the server's", err)
	}
	execute(t, conn, "alter table weir.log_1 drop constraint refusing")
	if answer := w.release(); !strings.Contains(answer, "WE009") {
		t.Errorf("the late attempt of a batch that was refused is answered with %q, want WE009", answer)
	}
	storedAs(t, conn, reported)

	// Given up: unknown, and it may be stored yet. The producer is not used again.
	ctx, cancel := context.WithCancel(t.Context())
	first(nil)
	w.set(isMarked, func() fault { cancel(); return hold })
	_, err = c.Produce(ctx, "t", marked("given up", 1)...)
	wantError(t, err, weir.ErrUnknownOutcome)
	wantError(t, err, context.Canceled)
	w.set(isMarked, func() fault { return pass })
	produce("after")
	if answer := w.release(); strings.Contains(answer, "WE") {
		t.Errorf("the late attempt that nobody waits for is answered with %q", answer)
	}
	reported[value[int64](t, conn, "select max(id) from weir.log_1")] = "marked given up 0"
	storedAs(t, conn, reported)
}

// The repetition comes while the first attempt still runs: it waits, and returns the first one's ids; where that one fails it
// stores.
func TestAttemptUnderWay(t *testing.T) {
	t.Parallel()
	admin, dsn := open(t, nil)
	noError(t, admin.CreateTopic(t.Context(), "t", nil))
	conn := connect(t, dsn)
	w := newWire(t, dsn)
	c := openDSN(t, w.dsn, &weir.Options{NoListen: true})
	for _, fails := range []bool{false, true} {
		before := value[int](t, conn, "select count(*)::int from weir.log_1")
		blocker := start(t, connect(t, dsn))
		execute(t, blocker, "lock table weir.log_1 in share mode")
		n := 0
		w.set(isMarked, func() fault {
			if n++; n == 1 {
				return cutLater
			}
			return pass
		})
		var (
			produced []weir.Produced
			err      error
			done     = make(chan struct{})
		)
		go func() {
			defer close(done)
			produced, err = c.Produce(t.Context(), "t", marked(fmt.Sprint(fails), 3)...)
		}()
		waiting := func(kind string) (pids []int32) {
			return column[int32](t, conn, `
				select pid from pg_locks
				where not granted and locktype = $1 and database = (select oid from pg_database where datname = current_database())`, kind)
		}
		eventually(t, "the first attempt waits for the log", func() bool { return len(waiting("relation")) == 1 })
		w.cut()
		eventually(t, "the second waits for the first", func() bool { return len(waiting("advisory")) == 1 })
		if fails {
			execute(t, conn, "select pg_terminate_backend($1)", waiting("relation")[0])
		}
		noError(t, blocker.Rollback(t.Context()))
		<-done
		noError(t, err)
		ids := column[int64](t, conn, "select id from weir.log_1 order by id")[before:]
		if !slices.Equal(ids, idsOf(produced)) || len(ids) != 3 {
			t.Errorf("first attempt fails: %v: %v are stored, %v was returned", fails, ids, produced)
		}
	}
}

// What is said when it cannot go on trying.
func TestUnknownOutcome(t *testing.T) {
	t.Parallel()
	admin, dsn := open(t, nil)
	noError(t, admin.CreateTopic(t.Context(), "t", nil))
	conn := connect(t, dsn)
	w := newWire(t, dsn)
	count := func() int { return value[int](t, conn, "select count(*)::int from weir.log_1") }
	for _, retry := range []time.Duration{300 * time.Millisecond, -1} {
		c := openDSN(t, w.dsn, &weir.Options{NoListen: true, ProduceRetry: retry})
		produced(t, c, "t", numbers(1)...) // it knows the topic
		before := count()
		// Sent, and the network is gone.
		w.set(isMarked, func() fault { w.down = true; return cutAfter })
		_, err := c.Produce(t.Context(), "t", marked("a", 1)...)
		wantError(t, err, weir.ErrUnknownOutcome, `topic "t"`)
		if !weir.CanRetry(err) {
			t.Errorf("it cannot be tried again: %v", err)
		}
		if count() != before+1 {
			t.Errorf("%d are stored, want %d", count(), before+1)
		}
		// Never sent: that is known.
		_, err = c.Produce(t.Context(), "t", marked("b", 1)...)
		if err == nil || errors.Is(err, weir.ErrUnknownOutcome) || count() != before+1 {
			t.Errorf("a produce that reached nobody: %v, %d are stored", err, count())
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = c.Produce(ctx, "t", marked("c", 1)...)
		if !errors.Is(err, context.Canceled) || errors.Is(err, weir.ErrUnknownOutcome) {
			t.Errorf("a call that was cancelled before it began: %v", err)
		}
		w.setDown(false)
	}

	// A copy whose commit is lost, and nobody is there to ask.
	c := openDSN(t, w.dsn, &weir.Options{NoListen: true, ProduceRetry: 300 * time.Millisecond})
	w.set(isCommit, func() fault { w.down = true; return cutAfter })
	n, err := c.Copy(t.Context(), "t", sequence(numbers(3)))
	wantError(t, err, weir.ErrUnknownOutcome, `topic "t"`)
	if n != 0 {
		t.Errorf("%d are reported as stored", n)
	}
	w.setDown(false)
}

// Copy cannot send its stream again. It finds out what became of its commit.
func TestCopyCommitIsCut(t *testing.T) {
	t.Parallel()
	admin, dsn := open(t, nil)
	noError(t, admin.CreateTopic(t.Context(), "t", nil))
	conn := connect(t, dsn)
	w := newWire(t, dsn)
	c := openDSN(t, w.dsn, &weir.Options{NoListen: true})
	count := func() int { return value[int](t, conn, "select count(*)::int from weir.log_1") }
	rng := rand.New(rand.NewPCG(1, 2))
	for _, what := range []fault{cutBefore, cutAtOnce, cutAfter, cutWithin, hold} {
		stores := 0
		for range 8 {
			before := count()
			w.set(isCommit, func() fault { w.within = 1 + rng.IntN(60); return what })
			n, err := c.Copy(t.Context(), "t", sequence(numbers(5)))
			switch {
			case err == nil:
				stores++
				if n != 5 || count() != before+5 {
					t.Errorf("fault %d: Copy says %d, %d were stored", what, n, count()-before)
				}
			case errors.Is(err, weir.ErrUnknownOutcome):
				t.Errorf("fault %d: %v", what, err)
			default:
				if n != 0 || !strings.Contains(err.Error(), "nothing was stored") {
					t.Errorf("fault %d: %d, %v", what, n, err)
				}
				if what == hold { // the commit comes when Copy has said that there is none
					if answer := w.release(); !strings.Contains(answer, "WE009") {
						t.Errorf("the late commit is answered with %q, want WE009", answer)
					}
				}
				eventually(t, "the transaction has ended", func() bool {
					return value[int](t, conn, "select count(*)::int from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'") == 0
				})
				if count() != before {
					t.Errorf("fault %d: %d were stored after %v", what, count()-before, err)
				}
			}
		}
		t.Logf("fault %d: %d of 8 were stored", what, stores)
		if stored := what == cutAfter || what == cutWithin; what != cutAtOnce && (stores == 8) != stored {
			t.Errorf("fault %d: %d of 8 were stored", what, stores)
		}
	}
}

// Batches of a producer, from SQL: what can be repeated and what is refused.
func TestProducerBatches(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	noError(t, c.CreateTopic(t.Context(), "u", nil))
	conn := connect(t, dsn)
	const one, two = "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"
	produce := func(topic, producer string, batch int, payloads string) []int64 {
		t.Helper()
		return column[int64](t, conn, "select id from weir.produce_batch($1, $2::json[], producer => $3::uuid, batch => $4)", topic, payloads, producer, batch)
	}
	refused := func(state, sql string, args ...any) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql, args...); err == nil || !strings.Contains(err.Error(), state) {
			t.Errorf("%s %v: error is %v, want %s", sql, args, err, state)
		}
	}
	again := "select weir.produce_batch($1, $2::json[], producer => $3::uuid, batch => $4)"

	first := produce("t", one, 1, "{1,2,3}")
	if got := produce("t", one, 1, "{1,2,3}"); !slices.Equal(got, first) {
		t.Errorf("repeated: %v, was %v", got, first)
	}
	refused("WE009", again, "t", "{1,2}", one, 1)
	refused("WE009", again, "u", "{1,2,3}", one, 1)
	if got := produce("t", two, 1, "{1}"); got[0] != 4 {
		t.Errorf("another producer's batch has id %v", got)
	}
	// Ids with a gap in them, and duplicates, come back the same.
	tx := start(t, conn)
	sql := "select id || ' ' || duplicate from weir.produce_batch('t', '{1,2,3,4}', idempotency_keys => '{a,null,a,b}', producer => $1::uuid, batch => 2)"
	mixed := column[string](t, tx, sql, one)
	noError(t, tx.Commit(t.Context()))
	if got := column[string](t, conn, sql, one); !slices.Equal(got, mixed) || strings.Count(fmt.Sprint(got), "true") != 1 {
		t.Errorf("repeated: %v, was %v", got, mixed)
	}
	refused("WE009", again, "t", "{1,2,3}", one, 1)
	refused("WE003", again, "t", "{1}", one, 0)
	refused("WE003", again, "t", "{1}", one, nil)
	refused("WE003", again, "t", "{1}", nil, 1)

	// A snapshot from before the first attempt does not show it.
	old, err := connect(t, dsn).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	noError(t, err)
	if _, err = old.Exec(t.Context(), again, "t", "{1}", two, 2); err == nil || !strings.Contains(err.Error(), "read committed") {
		t.Errorf("in repeatable read: %v", err)
	}
	noError(t, old.Rollback(t.Context()))

	// A transaction that rolled back did not use the number.
	tx = start(t, conn)
	execute(t, tx, again, "t", "{1}", two, 2)
	noError(t, tx.Rollback(t.Context()))
	produce("t", two, 2, "{5,6}")

	// Closed and recorded.
	closed := func(batch int) bool {
		return value[bool](t, conn, "select weir.close_batch($1::uuid, $2)", two, batch)
	}
	if !closed(2) || closed(3) || closed(3) {
		t.Error("batch 2 is stored, 3 is not")
	}
	refused("WE009", again, "t", "{1}", two, 3)
	refused("WE009", "select weir.record_batch($1::uuid, $2)", two, 3)
	refused("WE009", "select weir.close_batch($1::uuid, $2)", two, 2)
	execute(t, conn, "select weir.record_batch($1::uuid, 4)", two)
	if !closed(4) {
		t.Error("batch 4 is recorded")
	}
	refused("WE009", again, "t", "{1}", two, 4)
	refused("WE009", "select weir.record_batch($1::uuid, $2)", two, 4)

	// However many there are, one row is left, and the last can be repeated.
	for batch := 5; batch <= 420; batch++ {
		ids := produce("t", two, batch, "{1}")
		if batch%50 < 2 {
			if got := produce("t", two, batch, "{1}"); !slices.Equal(got, ids) {
				t.Errorf("batch %d repeated: %v, was %v", batch, got, ids)
			}
		}
	}
	if n := value[int](t, conn, "select count(*)::int from weir.producer where id = $1::uuid", two); n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
	refused("WE009", again, "t", "{1}", two, 5)
}

// While a snapshot is held, which keeps every version of a row, a produce visits a bounded number of buffers.
func TestProducerRowsUnderASnapshot(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	conn := connect(t, dsn)
	old, err := connect(t, dsn).BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	noError(t, err)
	defer old.Rollback(context.Background())
	value[int](t, old, "select count(*)::int from weir.producer")
	for range 2000 {
		produced(t, c, "t", numbers(1)...)
	}
	plan := strings.Join(column[string](t, conn, `
		explain (analyze, buffers, costs off, timing off, summary off)
		select p.batch from weir.producer as p
		where p.id = '`+value[string](t, conn, "select id::text from weir.producer")+`'
		  and p.part = `+value[string](t, conn, "select part::text from weir.producer")), "\n")
	visited := 0
	_, rest, _ := strings.Cut(plan, "shared hit=")
	_, _ = fmt.Sscan(rest, &visited)
	if visited == 0 || visited > 12 {
		t.Errorf("the look-up visits %d buffers:\n%s", visited, plan)
	}
}
