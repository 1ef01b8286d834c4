package weir_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/sql"
)

// longRun reports whether tests of storage take their full scale, by WEIR_LONG: a reader of a minute, ten million messages, thirty days.
func longRun() bool { return os.Getenv("WEIR_LONG") != "" }

// ownUpkeep are the options of a client whose upkeep is the test's.
var ownUpkeep = &weir.Options{NoMaintenance: true}

// upkeep does what is due until nothing is, and returns it. What a lock has postponed is tried again.
func upkeep(t *testing.T, c *weir.Client) (all []weir.Upkeep) {
	t.Helper()
	var emptied time.Time // what is emptied is dropped a second later
	eventually(t, "nothing is due", func() bool {
		for {
			done, due, err := c.Maintain(t.Context())
			noError(t, err)
			if !due || done.Action == "postponed" {
				return !due && time.Since(emptied) > 1200*time.Millisecond
			}
			if done.Action == "emptied" {
				emptied = time.Now()
			}
			all = append(all, done)
		}
	})
	return all
}

// upkeepUntil does what is due, and what becomes due, until cond holds.
func upkeepUntil(t *testing.T, c *weir.Client, what string, cond func() bool) {
	t.Helper()
	eventually(t, what, func() bool {
		if cond() {
			return true
		}
		_, _, err := c.Maintain(t.Context())
		noError(t, err)
		return false
	})
}

// did reports whether upkeep has an action.
func did(all []weir.Upkeep, action string) bool {
	return slices.ContainsFunc(all, func(u weir.Upkeep) bool { return u.Action == action })
}

// part is a row of weir.segment.
type part struct {
	Number           int
	Low, High        int64
	Sealed, Emptied  bool
	Messages, Bytes  int64
	Removed, Indexed int64
}

// parts are the segments of a topic in the order of their ids.
func parts(t *testing.T, q querier, topic string) []part {
	t.Helper()
	rows, err := q.Query(t.Context(), `
		select number, low, high, sealed_at is not null, emptied_at is not null, coalesce(messages, 0), coalesce(bytes, 0), removed, compared
		from weir.segment where topic_id = (select id from weir.topic where name = $1) order by low`, topic)
	noError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[part])
	noError(t, err)
	return list
}

// logOf is the table of a topic's log.
func logOf(t *testing.T, q querier, topic string) string {
	t.Helper()
	return fmt.Sprintf("weir.log_%d", value[int](t, q, "select id from weir.topic where name = $1", topic))
}

// logged are the ids that are in a topic's log.
func logged(t *testing.T, q querier, topic string) []int64 {
	t.Helper()
	return column[int64](t, q, "select id from "+logOf(t, q, topic)+" order by id")
}

// burn draws ids that no message gets.
func burn(t *testing.T, q querier, topic string, n int) {
	t.Helper()
	execute(t, q, "select count(*) from (select nextval(($1 || '_id')::regclass) from generate_series(1, $2::int)) as burned",
		logOf(t, q, topic), n)
}

// ageSealed makes the messages of sealed segments up to that number old.
func ageSealed(t *testing.T, q querier, topic string, number int, by string) {
	t.Helper()
	execute(t, q, `
		update weir.segment set first_at = first_at - $3::text::interval, last_at = last_at - $3::text::interval
		where topic_id = (select id from weir.topic where name = $1) and number <= $2`, topic, number, by)
}

// sealedUpTo does upkeep until the segment of that number is sealed.
func sealedUpTo(t *testing.T, c *weir.Client, q querier, topic string, number int) {
	t.Helper()
	upkeepUntil(t, c, fmt.Sprintf("segment %d is sealed", number), func() bool {
		for _, p := range parts(t, q, topic) {
			if p.Number >= number {
				return p.Number > number || p.Sealed
			}
		}
		return false
	})
}

// underway is a statement that another session runs.
type underway struct {
	t    *testing.T
	conn *pgx.Conn
	done chan error
}

// sends sends a statement through a session of its own and does not wait for its end.
func sends(t *testing.T, conn *pgx.Conn, sql string, args ...any) *underway {
	t.Helper()
	u := &underway{t: t, conn: conn, done: make(chan error, 1)}
	ctx := t.Context()
	go func() {
		_, err := conn.Exec(ctx, sql, args...)
		u.done <- err
	}()
	return u
}

// blocks demands that it waits for a lock.
func (u *underway) blocks(watch querier) {
	u.t.Helper()
	eventually(u.t, "the session waits for a lock", func() bool {
		select {
		case err := <-u.done:
			u.t.Fatalf("it was to wait for a lock, but ended: %v", err)
		default:
		}
		return value[bool](u.t, watch,
			"select coalesce(bool_or(wait_event_type = 'Lock'), false) from pg_stat_activity where pid = $1", u.conn.PgConn().PID())
	})
}

// ends waits for its end, and demands success.
func (u *underway) ends() {
	u.t.Helper()
	select {
	case err := <-u.done:
		noError(u.t, err)
	case <-time.After(30 * time.Second):
		u.t.Fatal("it has not ended within 30 s")
	}
}

// takeAll claims, fetches and acknowledges as consumer until nothing comes any more and the group is at the end of the log; returns
// the ids.
func takeAll(t *testing.T, q querier, topic, group, consumer string) (ids []int64) {
	t.Helper()
	eventually(t, "group "+group+" is at the end of the log", func() bool {
		for {
			list := claim(t, q, topic, group, consumer, 500, "1 hour")
			for _, l := range list {
				ids = append(ids, column[int64](t, q, "select id from weir.fetch($1)", l.ID)...)
				if !ack(t, q, l.ID, consumer) {
					t.Fatalf("lease %d was lost", l.ID)
				}
			}
			if len(list) == 0 {
				break
			}
		}
		return value[bool](t, q, `
			select lag = 0 and leases = 0 and waiting = 0 and retrying = 0 from weir.groups where topic = $1 and grp = $2`, topic, group)
	})
	return ids
}

// errorsOf collects what goes wrong in goroutines.
type errorsOf struct {
	mu   sync.Mutex
	list []error
}

func (e *errorsOf) add(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.list) < 5 {
		e.list = append(e.list, fmt.Errorf(format, args...))
	}
}

func (e *errorsOf) none(t *testing.T) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, err := range e.list {
		t.Error(err)
	}
}

// percentile gives that part of durations, 0 to 1.
func percentile(d []time.Duration, p float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[min(int(p*float64(len(d))), len(d)-1)]
}

// Segments are made and removed while a reader holds the log and producers go on: nobody waits for it.
func TestSegmentsUnderLoad(t *testing.T) {
	length := 8 * time.Second
	if longRun() {
		length = time.Minute
	}
	s := pgtest.New(t, &pgtest.Options{Fast: true})
	c, dsn := openOn(t, s, ownUpkeep)
	topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Second}, nil)
	handled := newTally()
	consume(t, c, "t", "g", weir.HandleBatch(func(_ context.Context, ms []*weir.Received[string]) error {
		for _, m := range ms {
			handled.add(m.ID)
		}
		return nil
	}), &weir.ConsumerOptions{Concurrency: 2, BatchSize: 500, Prefetch: 5000})

	var (
		wrong  errorsOf
		tasks  sync.WaitGroup
		mu     sync.Mutex
		took   []time.Duration
		stored []int64
		action = map[string]int{}
	)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	payload := strings.Repeat("x", 100)
	for i := range 8 {
		tasks.Go(func() {
			batch := make([]weir.Message, 10)
			for j := range batch {
				batch[j] = weir.Message{Payload: payload, Key: strconv.Itoa(i)}
			}
			for ctx.Err() == nil {
				began := time.Now()
				p, err := c.Produce(context.WithoutCancel(ctx), "t", batch...)
				if err != nil {
					wrong.add("produce: %w", err)
					return
				}
				mu.Lock()
				took = append(took, time.Since(began))
				stored = append(stored, idsOf(p)...)
				mu.Unlock()
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	tasks.Go(func() {
		for ctx.Err() == nil {
			done, due, err := c.Maintain(context.WithoutCancel(ctx))
			if err != nil {
				wrong.add("maintain: %w", err)
				return
			}
			mu.Lock()
			action[done.Action]++
			mu.Unlock()
			if !due || done.Action == "postponed" {
				time.Sleep(20 * time.Millisecond)
			}
		}
	})
	// What operators and newcomers do meanwhile.
	tasks.Go(func() {
		for ctx.Err() == nil {
			call := context.WithoutCancel(ctx)
			if _, err := c.Topics(call); err != nil {
				wrong.add("topics: %w", err)
			}
			if _, err := c.Groups(call, ""); err != nil {
				wrong.add("groups: %w", err)
			}
			if _, err := c.Read(call, "t", 0, 10); err != nil {
				wrong.add("read: %w", err)
			}
			if _, err := c.After(call, "t", weir.AtTime(time.Now().Add(-time.Hour))); err != nil {
				wrong.add("position: %w", err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	})

	watch := connect(t, dsn)
	eventually(t, "segments are removed", func() bool { p := parts(t, watch, "t"); return len(p) > 0 && p[0].Number > 3 })
	reader := connect(t, dsn)
	execute(t, reader, "begin isolation level repeatable read")
	execute(t, reader, "declare held no scroll cursor for select id from "+logOf(t, watch, "t"))
	execute(t, reader, "fetch 1 from held")
	before := parts(t, watch, "t")
	time.Sleep(length)
	during := parts(t, watch, "t")
	execute(t, reader, "fetch 1 from held")
	execute(t, reader, "rollback")
	if got := during[len(during)-1].Number - before[len(before)-1].Number; got < int(length/time.Second) {
		t.Errorf("%d segments were attached while a reader held the log for %v, want at least %d", got, length, length/time.Second)
	}
	if during[0].Number > before[0].Number+1 {
		t.Errorf("segment %d was removed under a reader that holds the log", before[0].Number)
	}
	last := before[len(before)-1].Number
	eventually(t, "what the reader has held is removed", func() bool { p := parts(t, watch, "t"); return p[0].Number > last })
	stop()
	tasks.Wait()
	wrong.none(t)
	drained(t, c, "t", "g")
	if missing := handled.missing(stored); len(missing) > 0 {
		t.Errorf("%d of %d messages were not handled, %v the first", len(missing), len(stored), missing[0])
	}
	p50, p99 := percentile(took, 0.5), percentile(took, 0.99)
	t.Logf("reader held the log for %v; %d segments made; %d messages; produce p50 %v, p99 %v, longest %v; maintenance: %v",
		length, during[len(during)-1].Number-before[len(before)-1].Number, len(stored), p50, p99, took[len(took)-1], action)
	// What is asked for is 100 ms; other work on the machine has its share in it.
	if p99 > 500*time.Millisecond {
		t.Errorf("p99 of produce is %v, want less than 100 ms on a machine of its own", p99)
	}
}

// Producers at the boundaries of tiny segments, by every way there is: what finds no segment makes one.
func TestHeal(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, ownUpkeep)
	noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000}))
	pool := newPool(t, dsn, func(p *pgxpool.Config) { p.MaxConns = 34 })
	via := newOn(t, pool, ownUpkeep)
	names := func(i, from, n int) []weir.Message {
		list := make([]weir.Message, n)
		for j := range list {
			list[j].Payload = fmt.Sprintf("%d/%d", i, from+j)
		}
		return list
	}
	texts := func(ms []weir.Message) []string {
		list := make([]string, len(ms))
		for j, m := range ms {
			list[j] = strconv.Quote(m.Payload.(string))
		}
		return list
	}
	inTx := func(ctx context.Context, f func(tx pgx.Tx) error) error { return pgx.BeginFunc(ctx, pool, f) }
	ways := []struct {
		name string
		send func(ctx context.Context, ms []weir.Message) error
	}{
		{"weir.produce", func(ctx context.Context, ms []weir.Message) error {
			for _, text := range texts(ms) {
				if _, err := pool.Exec(ctx, "select weir.produce('t', $1::text::json)", text); err != nil {
					return err
				}
			}
			return nil
		}},
		{"weir.produce_many", func(ctx context.Context, ms []weir.Message) error {
			_, err := pool.Exec(ctx, "select weir.produce_many('t', $1::text[]::json[])", texts(ms))
			return err
		}},
		{"Produce", func(ctx context.Context, ms []weir.Message) error {
			_, err := via.Produce(ctx, "t", ms...)
			return err
		}},
		{"Copy", func(ctx context.Context, ms []weir.Message) error {
			_, err := via.Copy(ctx, "t", func(yield func(weir.Message, error) bool) {
				for _, m := range ms {
					if !yield(m, nil) {
						return
					}
				}
			})
			return err
		}},
		{"weir.produce in a transaction", func(ctx context.Context, ms []weir.Message) error {
			return inTx(ctx, func(tx pgx.Tx) error {
				for _, text := range texts(ms) {
					if _, err := tx.Exec(ctx, "select weir.produce('t', $1::text::json)", text); err != nil {
						return err
					}
				}
				return nil
			})
		}},
		{"ProduceTx", func(ctx context.Context, ms []weir.Message) error {
			return inTx(ctx, func(tx pgx.Tx) error { _, err := via.ProduceTx(ctx, tx, "t", ms...); return err })
		}},
		{"CopyTx", func(ctx context.Context, ms []weir.Message) error {
			return inTx(ctx, func(tx pgx.Tx) error {
				_, err := via.CopyTx(ctx, tx, "t", func(yield func(weir.Message, error) bool) {
					for _, m := range ms {
						if !yield(m, nil) {
							return
						}
					}
				})
				return err
			})
		}},
		{"ProduceTx at repeatable read", func(ctx context.Context, ms []weir.Message) error {
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, "select 1"); err != nil { // the snapshot
					return err
				}
				_, err := via.ProduceTx(ctx, tx, "t", ms...)
				return err
			})
		}},
	}
	const producers, rounds, each = 32, 6, 70
	var wrong errorsOf
	var tasks sync.WaitGroup
	for i := range producers {
		tasks.Go(func() {
			way := ways[i%len(ways)]
			for r := range rounds {
				if err := way.send(t.Context(), names(i, r*each, each)); err != nil {
					wrong.add("%s: %w", way.name, err)
				}
			}
		})
	}
	tasks.Wait()
	wrong.none(t)
	conn := connect(t, dsn)
	stored := column[string](t, conn, "select payload #>> '{}' from weir.log_1")
	distinct := map[string]bool{}
	for _, p := range stored {
		distinct[p] = true
	}
	if want := producers * rounds * each; len(stored) != want || len(distinct) != want {
		t.Errorf("%d messages are stored, %d different ones, want %d", len(stored), len(distinct), want)
	}
	if n := value[int](t, conn, "select count(distinct id)::int from weir.log_1"); n != len(stored) {
		t.Errorf("%d ids for %d messages", n, len(stored))
	}
	if n := len(parts(t, conn, "t")); n < 14 {
		t.Errorf("%d segments, want at least 14: no boundary was passed", n)
	}
}

// A producer that has made a segment stays open. Others go on, in what there is and in what was made ahead.
func TestHealOpenTransaction(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"maintenance", "a consumer's poll", "the open transaction"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, ownUpkeep)
			topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 100_000}, nil)
			a, b := connect(t, dsn), connect(t, dsn)
			execute(t, b, "select weir.produce('t', '0')")
			burn(t, b, "t", 100_000) // into the second segment, beyond which there is none yet
			switch by {
			case "maintenance":
				if all := upkeep(t, c); !did(all, "extended") {
					t.Fatalf("maintenance did %v, want a segment made ahead", all)
				}
			case "a consumer's poll":
				execute(t, b, "select * from weir.poll('t', 'g', 'b', 10, '1 min', 1000000, null, true)")
			}
			burn(t, b, "t", 60_000) // past the middle, where producers make the next segment
			tx := start(t, a)
			execute(t, tx, "select weir.produce('t', '1')")
			execute(t, b, "set lock_timeout = '1 s'")
			produce := func() { execute(t, b, "select weir.produce_many('t', array_fill('2'::json, array[100]))") }
			produce()
			if by == "the open transaction" {
				// There is room: nobody waits for it. Nor does maintenance go round and round.
				if n := len(parts(t, a, "t")); n != 3 {
					t.Fatalf("the open transaction sees %d segments, want the one it has made", n)
				}
				done, due, err := c.Maintain(t.Context())
				if err != nil || !due || done.Action != "postponed" {
					t.Errorf("maintenance says %+v, %v, want postponed", done, err)
				}
			} else {
				// Past the end, in the segment that was made ahead.
				burn(t, b, "t", 45_000)
				produce()
			}
			noError(t, tx.Commit(t.Context()))
			burn(t, b, "t", 45_000)
			produce()
		})
	}
}

func TestRetention(t *testing.T) {
	t.Parallel()
	many := func(t *testing.T, q querier, topic string, n int) {
		t.Helper()
		execute(t, q, `
			select count(*) from weir.produce_many($1, array(select to_json(i) from generate_series(1, $2::int) as i),
			    array(select 'k' || i % 10 from generate_series(1, $2::int) as i))`, topic, n)
	}
	// gone reports up to which segment the messages are removed.
	gone := func(t *testing.T, q querier, topic string) int {
		t.Helper()
		for _, p := range parts(t, q, topic) {
			if !p.Emptied {
				return p.Number - 1
			}
		}
		t.Fatal("no segment is left")
		return 0
	}

	t.Run("age", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Hour}))
		q := connect(t, dsn)
		many(t, q, "t", 2500)
		sealedUpTo(t, c, q, "t", 2)
		upkeep(t, c)
		if n := gone(t, q, "t"); n != 0 {
			t.Fatalf("segment %d is removed before its time", n)
		}
		ageSealed(t, q, "t", 1, "2 hours")
		all := upkeep(t, c)
		if !did(all, "emptied") || !did(all, "dropped") || len(parts(t, q, "t")) == 0 || parts(t, q, "t")[0].Number != 2 {
			t.Errorf("upkeep did %v and left %v, want segment 1 removed", all, parts(t, q, "t"))
		}
		if ids := logged(t, q, "t"); len(ids) != 1500 || ids[0] != 1001 {
			t.Errorf("%d messages are left, %d the first, want 1500 from 1001 on", len(ids), ids[0])
		}
		topic, err := c.Topic(t.Context(), "t")
		noError(t, err)
		if topic.Messages != 1500 || topic.Bytes <= 0 || topic.OldestAt == nil || topic.RetentionAge != time.Hour {
			t.Errorf("topic is %+v, want 1500 messages", topic)
		}
	})

	t.Run("bytes", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000}))
		q := connect(t, dsn)
		many(t, q, "t", 5500)
		sealedUpTo(t, c, q, "t", 5)
		all := parts(t, q, "t")
		total := value[int64](t, q, "select bytes from weir.topics")
		// All but a little less than the first two: the second would take it below.
		limit := total - all[0].Bytes - all[1].Bytes + 1
		noError(t, c.AlterTopic(t.Context(), "t", weir.TopicChange{RetentionBytes: &limit}))
		upkeep(t, c)
		if n := gone(t, q, "t"); n != 1 {
			t.Errorf("removed up to segment %d, want 1: %d of %d bytes are kept", n, limit, total)
		}
		if kept := value[int64](t, q, "select bytes from weir.topics"); kept < limit {
			t.Errorf("%d bytes are kept, want at least %d", kept, limit)
		}
		none := int64(0)
		noError(t, c.AlterTopic(t.Context(), "t", weir.TopicChange{RetentionBytes: &none}))
		many(t, q, "t", 1000)
		upkeep(t, c)
		if n := gone(t, q, "t"); n != 1 {
			t.Errorf("removed up to segment %d without a limit", n)
		}
	})

	t.Run("both", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Hour, RetentionBytes: 1 << 40}))
		q := connect(t, dsn)
		many(t, q, "t", 4500)
		sealedUpTo(t, c, q, "t", 4)
		ageSealed(t, q, "t", 1, "2 hours")
		upkeep(t, c)
		if n := gone(t, q, "t"); n != 1 {
			t.Errorf("by age: removed up to segment %d, want 1", n)
		}
		little := int64(1)
		noError(t, c.AlterTopic(t.Context(), "t", weir.TopicChange{RetentionBytes: &little}))
		upkeep(t, c)
		if n := gone(t, q, "t"); n != 4 {
			t.Errorf("by bytes: removed up to segment %d, want all that are full", n)
		}
	})

	// The number of messages is an estimate: at none, the segment is looked at before it goes.
	t.Run("estimate", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000}))
		q := connect(t, dsn)
		many(t, q, "t", 1500)
		sealedUpTo(t, c, q, "t", 1)
		execute(t, q, "update weir.segment set messages = 0 where number = 1")
		upkeep(t, c)
		if ids := logged(t, q, "t"); len(ids) != 1500 {
			t.Errorf("%d messages are left of a topic that keeps all 1500", len(ids))
		}
	})

	t.Run("needed", func(t *testing.T) {
		t.Parallel()
		ctx := t.Context()
		for _, hold := range []struct {
			name string
			mode weir.Mode
			// begin makes the group need a message of segment 1, end ends that.
			begin, end func(t *testing.T, c *weir.Client, q querier)
		}{
			{"a lease", weir.Stream, func(t *testing.T, c *weir.Client, q querier) {
				l := claimOne(t, q, "t", "g", "holder", 10, "1 hour")
				for value[int64](t, q, "select claimed from weir.groups") < 1500 {
					ack(t, q, claimOne(t, q, "t", "g", "other", 500, "1 hour").ID, "other")
				}
				if l.Low != 0 {
					t.Fatalf("the first lease is %+v", l)
				}
			}, func(t *testing.T, c *weir.Client, q querier) {
				if !ack(t, q, value[int64](t, q, "select lease_id from weir.leases where consumer = 'holder'"), "holder") {
					t.Error("the lease was lost")
				}
			}},
			{"an expired lease", weir.Stream, func(t *testing.T, c *weir.Client, q querier) {
				claimOne(t, q, "t", "g", "holder", 1000, "1 hour")
				ack(t, q, claimOne(t, q, "t", "g", "other", 500, "1 hour").ID, "other")
				expire(t, q)
			}, func(t *testing.T, c *weir.Client, q querier) { takeAll(t, q, "t", "g", "other") }},
			{"what its shards have pending", weir.Ordered, func(t *testing.T, c *weir.Client, q querier) {
				for _, l := range claim(t, q, "t", "g", "x", 10, "1 hour") {
					ack(t, q, l.ID, "x")
				}
				if n := value[int](t, q, "select count(*)::int from weir.shard_range"); n == 0 {
					t.Fatal("nothing is pending")
				}
			}, func(t *testing.T, c *weir.Client, q querier) { takeAll(t, q, "t", "g", "x") }},
			{"a pause", weir.Queue, func(t *testing.T, c *weir.Client, q querier) {
				if paused, err := c.PauseGroup(ctx, "t", "g"); err != nil || !paused {
					t.Fatal(paused, err)
				}
			}, func(t *testing.T, c *weir.Client, q querier) {
				if resumed, err := c.ResumeGroup(ctx, "t", "g"); err != nil || !resumed {
					t.Fatal(resumed, err)
				}
				takeAll(t, q, "t", "g", "x")
			}},
			{"nobody has begun", weir.Stream, func(*testing.T, *weir.Client, querier) {}, func(t *testing.T, c *weir.Client, q querier) {
				takeAll(t, q, "t", "g", "x")
			}},
		} {
			t.Run(hold.name, func(t *testing.T) {
				t.Parallel()
				c, dsn := open(t, ownUpkeep)
				topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Hour, RetentionBytes: 1}, &weir.GroupOptions{Mode: hold.mode})
				q := connect(t, dsn)
				many(t, q, "t", 1500)
				eventually(t, "all is settled", func() bool {
					id, err := c.After(t.Context(), "t", weir.Head())
					noError(t, err)
					return id == 1500
				})
				hold.begin(t, c, q)
				sealedUpTo(t, c, q, "t", 1)
				ageSealed(t, q, "t", 1, "2 hours")
				upkeep(t, c)
				if n := len(logged(t, q, "t")); n != 1500 {
					t.Fatalf("%d of 1500 messages are left, one of which the group needs", n)
				}
				hold.end(t, c, q)
				upkeepUntil(t, c, "segment 1 is removed", func() bool { return parts(t, q, "t")[0].Number > 1 })
			})
		}
	})

	// What groups had not finished is counted to the message, and they go on behind it.
	t.Run("unread", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Hour, DropUnread: true}))
		q := connect(t, dsn)
		type reader struct {
			name  string
			mode  weir.Mode
			keys  string
			want  int // messages of the filter
			began bool
		}
		var readers []reader
		for _, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
			for _, keys := range []string{"", "k3"} {
				for _, began := range []bool{true, false} {
					r := reader{fmt.Sprintf("%s%s %v", mode, keys, began), mode, keys, 2500, began}
					if keys != "" {
						r.want = 250
					}
					noError(t, c.CreateGroup(t.Context(), "t", r.name, &weir.GroupOptions{Mode: mode, KeyPrefix: keys, Shards: map[weir.Mode]int{weir.Ordered: 4}[mode], RetryDelay: -1}))
					readers = append(readers, r)
				}
			}
		}
		many(t, q, "t", 2500)
		eventually(t, "all is settled", func() bool {
			id, err := c.After(t.Context(), "t", weir.Head())
			noError(t, err)
			return id == 2500
		})
		handled, held := map[string]*tally{}, map[string][]int64{}
		for _, r := range readers {
			y := newTally()
			handled[r.name] = y
			if !r.began {
				continue
			}
			// Some messages are handled, one has failed, some are held.
			for i, l := range claim(t, q, "t", r.name, "x", 40, "1 hour") {
				ids := column[int64](t, q, "select id from weir.fetch($1)", l.ID)
				if i == 0 {
					if !value[bool](t, q, "select weir.fail($1, 'x', $2, 'later', '1 hour')", l.ID, ids[len(ids)-1]) {
						t.Fatal("a failure was refused")
					}
					ids = ids[:len(ids)-1]
				}
				if r.mode == weir.Ordered && i == 0 {
					// What is parked behind it is not this lease's any more.
					ids = column[int64](t, q, "select i from unnest($1::bigint[]) as i where not exists (select from weir.delivery as d where d.message_id = i and d.group_id = (select id from weir.groups where grp = $2))", ids, r.name)
				}
				if r.mode == weir.Queue && i == 0 {
					continue
				}
				if !ack(t, q, l.ID, "x") {
					t.Fatal("an acknowledgement was refused")
				}
				y.add(ids...)
			}
			for _, l := range claim(t, q, "t", r.name, "x", 30, "1 hour") {
				held[r.name] = append(held[r.name], l.ID)
			}
		}
		sealedUpTo(t, c, q, "t", 2)
		ageSealed(t, q, "t", 1, "2 hours")
		upkeepUntil(t, c, "segment 1 is removed", func() bool { return parts(t, q, "t")[0].Number > 1 })
		execute(t, q, "update weir.delivery set due_at = clock_timestamp() where state in ('ready', 'parked')")
		for _, r := range readers {
			y := handled[r.name]
			for _, l := range held[r.name] {
				if ids := column[int64](t, q, "select message_id from weir.delivery where lease_id = $1", l); ack(t, q, l, "x") {
					y.add(ids...) // a copy of its own
					if r.mode != weir.Queue {
						t.Errorf("%s: a lease of what is removed was acknowledged", r.name)
					}
				}
			}
			y.add(takeAll(t, q, "t", r.name, "y")...)
			g := group(t, c, "t", r.name)
			if y.distinct()+int(g.Missed) != r.want || y.calls() != y.distinct() {
				t.Errorf("%s: %d messages were handled, %d times, and %d missed, want %d together and each once", r.name, y.distinct(), y.calls(), g.Missed, r.want)
			}
			if r.mode != weir.Queue && !r.began && int(g.Missed) != r.want*1000/2500 {
				t.Errorf("%s: %d messages were missed, want all of segment 1, %d", r.name, g.Missed, r.want*1000/2500)
			}
			if after := column[int64](t, q, "select id from weir.log_1 where starts_with(key, $1) order by id", r.keys); len(y.missing(after)) > 0 {
				t.Errorf("%s: %v of what is left were not handled", r.name, y.missing(after))
			}
		}
	})

	// What was deleted is not missed.
	t.Run("unread and deleted", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Hour, DropUnread: true}, &weir.GroupOptions{Mode: weir.Ordered})
		q := connect(t, dsn)
		many(t, q, "t", 1500)
		var handled int
		eventually(t, "something is handed out", func() bool {
			for _, l := range claim(t, q, "t", "g", "x", 20, "1 hour") {
				handled += len(column[int64](t, q, "select id from weir.fetch($1) where key <> 'k3'", l.ID))
				ack(t, q, l.ID, "x")
			}
			return handled > 0
		})
		deleted, err := c.DeleteKey(t.Context(), "t", "k3", nil)
		if err != nil || deleted != 150 {
			t.Fatalf("%d messages were deleted, %v, want 150", deleted, err)
		}
		sealedUpTo(t, c, q, "t", 1)
		ageSealed(t, q, "t", 1, "2 hours")
		upkeepUntil(t, c, "segment 1 is removed", func() bool { return parts(t, q, "t")[0].Number > 1 })
		if g := group(t, c, "t", "g"); int(g.Missed)+handled != 900 {
			t.Errorf("%d messages were missed and %d handled, want 900 together", g.Missed, handled)
		}
	})

	// Ten messages a day: each day's segment goes a day and a bit later, though it is all but empty.
	t.Run("slow", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		topicAndGroup(t, c, "t", "g", &weir.TopicOptions{RetentionAge: 24 * time.Hour}, nil)
		q := connect(t, dsn)
		for day := range 6 {
			ids := produced(t, c, "t", numbers(10)...)
			if got := takeAll(t, q, "t", "g", "x"); !slices.Equal(got, ids) {
				t.Fatalf("day %d: the group got %v, want %v", day, got, ids)
			}
			upkeep(t, c)
			if n := len(logged(t, q, "t")); n < 10 || n > 30 {
				t.Fatalf("day %d: %d messages are kept, want those of a day or two", day, n)
			}
			// A day passes.
			execute(t, q, "update weir.log_1 set produced_at = produced_at - interval '1 day'")
			execute(t, q, "update weir.segment set created_at = created_at - interval '1 day'")
			ageSealed(t, q, "t", 1<<30, "1 day")
			upkeepUntil(t, c, "the segment is rolled", func() bool {
				return value[int64](t, q, "select last_value from weir.log_1_id") >= int64(day+1)*10_000
			})
		}
		takeAll(t, q, "t", "g", "x")
		upkeepUntil(t, c, "old segments are removed", func() bool { return len(parts(t, q, "t")) <= 4 })
		if n := value[int64](t, q, "select high from weir.segment order by high desc limit 1"); n > 200_000 {
			t.Errorf("sixty messages took segments up to id %d, want small ones", n)
		}
	})

	// A segment holds an eighth of the retention at the pace of late, within bounds.
	t.Run("size", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		q := connect(t, dsn)
		for _, k := range []struct {
			name      string
			age       time.Duration
			drawn     int
			since     string
			low, high int64
		}{
			{"slow", time.Hour, 10_001, "1 day", 10_000, 10_000},
			{"middling", 800 * time.Second, 12_000, "10 s", 100_000, 130_000},
			{"fast", 24 * time.Hour, 12_000, "1 s", 1_000_000, 1_000_000},
			{"for ever", 0, 1_000_001, "1 s", 1_000_000, 1_000_000},
		} {
			noError(t, c.CreateTopic(t.Context(), k.name, &weir.TopicOptions{RetentionAge: k.age}))
			first := parts(t, q, k.name)[0]
			if want := map[bool]int64{true: 1_000_000, false: 10_000}[k.age == 0]; first.High-first.Low != want {
				t.Errorf("%s: the first segment holds %d ids, want %d", k.name, first.High-first.Low, want)
			}
			execute(t, q, "update weir.segment set created_at = clock_timestamp() - $2::text::interval where topic_id = (select id from weir.topic where name = $1)", k.name, k.since)
			burn(t, q, k.name, k.drawn)
			if all := upkeep(t, c); !did(all, "extended") {
				t.Fatalf("%s: upkeep did %v, want a segment made ahead", k.name, all)
			}
			list := parts(t, q, k.name)
			next := list[len(list)-1]
			if size := next.High - next.Low; size < k.low || size > k.high {
				t.Errorf("%s: the next segment holds %d ids, want %d to %d", k.name, size, k.low, k.high)
			}
		}
	})

	t.Run("refused", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		q := connect(t, dsn)
		noError(t, c.CreateTopic(t.Context(), "t", nil))
		noError(t, c.CreateTopic(t.Context(), "other", nil))
		for _, options := range []string{
			`{"retention_age": "0 s"}`, `{"retention_age": "-1 s"}`, `{"retention_age": "101 years"}`, `{"retention_age": "soon"}`, `{"retention_age": "999 ms"}`,
			`{"retention_bytes": 0}`, `{"retention_bytes": -1}`, `{"retention_bytes": 1.5}`, `{"retention_bytes": "much"}`,
			`{"segment_size": 999}`, `{"segment_size": 0}`, `{"segment_size": -1}`, `{"segment_size": 1000000001}`, `{"segment_size": null, "x": 1}`,
			`{"drop_unread": "yes"}`, `{"tombstone_ttl": "-1 s"}`,
		} {
			for _, call := range []string{"select weir.create_topic('new', $1::text::jsonb)", "select weir.alter_topic('t', $1::text::jsonb)"} {
				_, err := q.Exec(t.Context(), call, options)
				var pg *pgconn.PgError
				if !errors.As(err, &pg) || pg.Code != "WE003" || pg.Hint == "" {
					t.Errorf("%s with %s: %v, want WE003 with a hint", call, options, err)
				}
			}
		}
		for _, o := range []weir.TopicOptions{{RetentionAge: -1}, {RetentionAge: time.Millisecond}, {RetentionBytes: -1}, {SegmentSize: -1}, {SegmentSize: 10}, {TombstoneTTL: -1}} {
			wantError(t, c.CreateTopic(t.Context(), "new", &o), weir.ErrInvalid)
		}
		bad, size := -time.Second, int64(5)
		wantError(t, c.AlterTopic(t.Context(), "t", weir.TopicChange{RetentionAge: &bad}), weir.ErrInvalid, "retention_age")
		wantError(t, c.AlterTopic(t.Context(), "t", weir.TopicChange{SegmentSize: &size}), weir.ErrInvalid, "segment_size")
		wantError(t, c.AlterTopic(t.Context(), "missing", weir.TopicChange{SegmentSize: &size}), weir.ErrTopicNotFound)
		wantError(t, c.RenameTopic(t.Context(), "t", "other"), weir.ErrConflict, "other")
		if n := value[int](t, q, "select count(*)::int from weir.topics where retention_age is null and retention_bytes is null and segment_size = 1000000 and not drop_unread"); n != 2 {
			t.Errorf("%d topics are as they were, want both and no other", n)
		}
		// A snapshot of before would hide what a group needs now.
		tx, err := q.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		noError(t, err)
		_, err = tx.Exec(t.Context(), "select * from weir.maintain()")
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "WE003" {
			t.Errorf("maintenance at repeatable read: %v, want WE003", err)
		}
		noError(t, tx.Rollback(t.Context()))
	})

	// Delayed, failed and dead messages have copies of their own.
	t.Run("deliveries", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		for _, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
			topic := string(mode)
			topicAndGroup(t, c, topic, "g", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Hour}, &weir.GroupOptions{Mode: mode, RetryDelay: -1})
			q := connect(t, dsn)
			list := numbers(4)
			for i := range list {
				list[i].Key = fmt.Sprint("key", i)
			}
			list[0].Delay = time.Hour
			ids := produced(t, c, topic, list...)
			handled := newTally()
			var leases []claimed
			eventually(t, "three are handed out", func() bool {
				leases = append(leases, claim(t, q, topic, "g", "x", 100, "1 hour")...)
				return value[int64](t, q, "select claimed from weir.groups where topic = $1", topic) == 4
			})
			for _, l := range leases {
				for _, id := range column[int64](t, q, "select id from weir.fetch($1)", l.ID) {
					switch id {
					case ids[1]:
						execute(t, q, "select weir.fail($1, 'x', $2, 'again', '1 hour')", l.ID, id)
					case ids[2]:
						execute(t, q, "select weir.fail($1, 'x', $2, 'no', null, 'dead')", l.ID, id)
					default:
						handled.add(id)
					}
				}
				ack(t, q, l.ID, "x")
			}
			many(t, q, topic, 1500)
			takeAllBut := func() {
				for _, l := range claim(t, q, topic, "g", "x", 1000, "1 hour") {
					ack(t, q, l.ID, "x")
				}
			}
			upkeepUntil(t, c, "segment 1 is removed", func() bool {
				takeAllBut()
				ageSealed(t, q, topic, 1, "2 hours")
				return parts(t, q, topic)[0].Number > 1
			})
			if n, err := c.Redrive(t.Context(), topic, "g", ids[2]); err != nil || n != 1 {
				t.Fatalf("%s: redriven %d, %v", mode, n, err)
			}
			execute(t, q, "update weir.delivery set due_at = clock_timestamp() where state = 'ready'")
			texts := map[int64]string{}
			eventually(t, "all are handled", func() bool {
				for _, l := range claim(t, q, topic, "g", "x", 1000, "1 hour") {
					rows, err := q.Query(t.Context(), "select id, payload::text from weir.fetch($1)", l.ID)
					noError(t, err)
					var id int64
					var text string
					_, err = pgx.ForEachRow(rows, []any{&id, &text}, func() error { texts[id] = text; return nil })
					noError(t, err)
					ack(t, q, l.ID, "x")
				}
				return texts[ids[0]] != "" && texts[ids[1]] != "" && texts[ids[2]] != ""
			})
			if texts[ids[0]] != "1" || texts[ids[1]] != "2" || texts[ids[2]] != "3" || handled.count(ids[3]) != 1 {
				t.Errorf("%s: delivered %v %v %v", mode, texts[ids[0]], texts[ids[1]], texts[ids[2]])
			}
			if g := group(t, c, topic, "g"); g.Missed != 0 {
				t.Errorf("%s: %d messages were missed", mode, g.Missed)
			}
		}
	})
}

// byKey are the messages of a topic as the latest of each key, by key.
func byKey(t *testing.T, q querier, sql string, args ...any) map[string]string {
	t.Helper()
	rows, err := q.Query(t.Context(), sql, args...)
	noError(t, err)
	latest := map[string]string{}
	var key, text string
	_, err = pgx.ForEachRow(rows, []any{&key, &text}, func() error { latest[key] = text; return nil })
	noError(t, err)
	return latest
}

func TestCompaction(t *testing.T) {
	t.Parallel()
	for _, format := range []weir.Format{weir.JSON, weir.JSONB, weir.Bytes} {
		t.Run(string(format), func(t *testing.T) {
			t.Parallel()
			testCompaction(t, format)
		})
	}
}

func testCompaction(t *testing.T, format weir.Format) {
	c, dsn := open(t, ownUpkeep)
	q, old := connect(t, dsn), connect(t, dsn)
	noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{Format: format, SegmentSize: 3000, Compact: true}))
	noError(t, c.CreateGroup(t.Context(), "t", "running", nil))
	payload := func(i int) any {
		if format == weir.Bytes {
			return []byte(fmt.Sprint("v", i))
		}
		return fmt.Sprint("v", i)
	}
	sent := 0
	send := func(n int) (ids []int64) {
		t.Helper()
		for n > 0 {
			list := make([]weir.Message, min(n, 1000))
			for i := range list {
				list[i] = weir.Message{Key: fmt.Sprint("k", sent%50), Payload: payload(sent)}
				sent++
			}
			ids = append(ids, produced(t, c, "t", list...)...)
			n -= len(list)
		}
		return ids
	}
	text := func(m weir.Received[[]byte]) string { return strings.Trim(string(m.Raw), `"`) }
	wantCurrent := func(when string) {
		t.Helper()
		for k := range 50 {
			want := sent - sent%50 + k
			if k >= sent%50 {
				want -= 50
			}
			m, ok, err := c.Current(t.Context(), "t", fmt.Sprint("k", k))
			noError(t, err)
			if !ok || text(m) != fmt.Sprint("v", want) {
				t.Fatalf("%s: the current message of k%d is %q, %v, want v%d", when, k, m.Raw, ok, want)
			}
		}
	}

	// What needs a key and has none is refused, whatever the way.
	for name, err := range map[string]error{
		"Produce": second(c.Produce(t.Context(), "t", weir.Message{Payload: payload(0)})),
		"Copy": second(c.Copy(t.Context(), "t", func(yield func(weir.Message, error) bool) {
			yield(weir.Message{Payload: payload(0)}, nil)
		})),
	} {
		if !errors.Is(err, weir.ErrInvalid) {
			t.Errorf("%s of a message without a key: %v, want ErrInvalid", name, err)
		}
	}
	statement := map[weir.Format][]string{
		weir.Bytes: {"select weir.produce_bytes('t', 'x')", "select weir.produce_many_bytes('t', array['x'::bytea])", "select weir.produce_many_bytes('t', array['x', 'y']::bytea[], array['k', null])"},
	}[format]
	if statement == nil {
		statement = []string{"select weir.produce('t', '1')", "select weir.produce_many('t', array['1'::json])", "select weir.produce_many('t', array['1', '2']::json[], array['k', null])"}
	}
	for _, s := range statement {
		_, err := q.Exec(t.Context(), s)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "WE003" {
			t.Errorf("%s: %v, want WE003", s, err)
		}
	}

	all := send(7000) // two segments are full, ids may have been burned by what was refused
	l := claimOne(t, q, "t", "running", "r", 2000, "1 hour")
	ack(t, q, l.ID, "r")
	sealedUpTo(t, c, q, "t", 2)
	upkeep(t, c)
	if n := len(logged(t, q, "t")); n != 7000 {
		t.Fatalf("%d of 7000 messages are left, and a running group has yet to get those from %d on", n, l.High+1)
	}
	wantCurrent("before")
	// It gets every message there was.
	got := takeAll(t, q, "t", "running", "r")
	if want := slices.DeleteFunc(slices.Clone(all), func(id int64) bool { return id <= l.High }); !slices.Equal(got, want) {
		t.Errorf("the running group got %d messages, want %d", len(got), len(want))
	}

	// Those who are at it when it is compacted: a lease that was made before and is read after it, and a transaction whose snapshot
	// is from before.
	noError(t, c.CreateGroup(t.Context(), "t", "early", nil))
	noError(t, c.CreateGroup(t.Context(), "t", "snapshot", nil))
	execute(t, q, "update weir.cursor set claimed = 6500 where group_id in (select id from weir.groups where grp in ('early', 'snapshot'))")
	before := byKey(t, q, "select key, max(id)::text from "+logOf(t, q, "t")+" group by key")
	done := upkeep(t, c)
	if !did(done, "compacted") || !did(done, "rewritten") {
		t.Fatalf("upkeep did %v, want segments compacted and rewritten", done)
	}
	wantCurrent("after")
	if after := byKey(t, q, "select key, max(id)::text from "+logOf(t, q, "t")+" group by key"); !slices.Equal(sortedPairs(before), sortedPairs(after)) {
		t.Errorf("the latest messages were %v and are %v", before, after)
	}
	if p := parts(t, q, "t"); p[0].Number == 1 {
		t.Error("a segment without messages is left")
	}
	sealedMessages := value[int](t, q, "select count(*)::int from "+logOf(t, q, "t")+" where id <= (select max(high) - 1 from weir.segment where sealed_at is not null)")
	if sealedMessages != 50 {
		t.Errorf("%d messages are left in full segments, want one of each of the 50 keys", sealedMessages)
	}

	// A group from the beginning gets the compacted state and goes on live.
	noError(t, c.CreateGroup(t.Context(), "t", "new", nil))
	state := logged(t, q, "t")
	if got := takeAll(t, q, "t", "new", "n"); !slices.Equal(got, state) {
		t.Errorf("a new group got %d messages, want the %d there are", len(got), len(state))
	}
	live := send(10)
	if got := takeAll(t, q, "t", "new", "n"); !slices.Equal(got, live) {
		t.Errorf("a new group got %v, want %v", got, live)
	}
	// The empty segment is removed, and a topic that is kept for ever keeps the rest.
	takeAll(t, q, "t", "running", "r")
	takeAll(t, q, "t", "early", "e")
	takeAll(t, q, "t", "snapshot", "s")
	wantCurrent("later")

	// Rewritten under a snapshot from before and a lease from before.
	send(2500)
	for _, g := range []string{"running", "early", "new"} {
		takeAll(t, q, "t", g, "x")
	}
	execute(t, q, "select weir.drop_group('t', 'snapshot', true)")
	noError(t, c.CreateGroup(t.Context(), "t", "lease", nil))
	lease := claimOne(t, q, "t", "lease", "l", 10, "1 hour")
	tx, err := old.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	noError(t, err)
	execute(t, tx, "select") // its snapshot, and no lock on the log, for which the rewriting would wait
	state = logged(t, q, "t")
	rewritten := value[int](t, q, "select number from weir.segment where low <= $1 and high > $1", lease.High)
	execute(t, q, "select weir.rewrite_segment(s) from weir.segment as s where s.number = $1", rewritten)
	if got := column[int64](t, q, "select id from weir.fetch($1)", lease.ID); !slices.Equal(got, state[:10]) {
		t.Errorf("a lease from before the rewriting has %v, want %v", got, state[:10])
	}
	execute(t, tx, "select weir.create_group('t', 'snapshot')")
	var seen []int64
	for range 20 {
		for _, l := range claim(t, tx, "t", "snapshot", "s", 5000, "1 hour") {
			seen = append(seen, column[int64](t, tx, "select id from weir.fetch($1)", l.ID)...)
			ack(t, tx, l.ID, "s")
		}
	}
	noError(t, tx.Commit(t.Context()))
	seen = append(seen, takeAll(t, q, "t", "snapshot", "s")...)
	if missing := slices.DeleteFunc(slices.Clone(state), func(id int64) bool { return slices.Contains(seen, id) }); len(missing) > 0 {
		t.Errorf("a transaction whose snapshot is older than the rewriting passed over %d messages, %v the first", len(missing), missing[0])
	}
	ack(t, q, lease.ID, "l")

	// A tombstone: the key is gone at once, the tombstone after its time.
	stone, err := c.Produce(t.Context(), "t", weir.Message{Key: "k0", Tombstone: true})
	noError(t, err)
	if _, ok, err := c.Current(t.Context(), "t", "k0"); err != nil || ok {
		t.Errorf("a key with a tombstone is there: %v, %v", ok, err)
	}
	var rest []weir.Message
	for i := range 3100 {
		rest = append(rest, weir.Message{Key: fmt.Sprint("k", 1+i%49), Payload: payload(i)})
	}
	produced(t, c, "t", rest...)
	for _, g := range []string{"running", "early", "new", "lease", "snapshot"} {
		if !slices.Contains(takeAll(t, q, "t", g, "x"), stone[0].ID) {
			t.Errorf("group %s did not get the tombstone", g)
		}
	}
	hasStone := func() bool {
		return value[bool](t, q, "select exists (select from "+logOf(t, q, "t")+" where id = $1)", stone[0].ID)
	}
	sealedUpTo(t, c, q, "t", value[int](t, q, "select number from weir.segment where low <= $1 and high > $1", stone[0].ID))
	upkeep(t, c)
	if keys := column[int64](t, q, "select id from "+logOf(t, q, "t")+" where key = 'k0'"); !slices.Equal(keys, []int64{stone[0].ID}) {
		t.Errorf("of a key with a tombstone %v are left, want the tombstone %d", keys, stone[0].ID)
	}
	now := time.Duration(0)
	noError(t, c.AlterTopic(t.Context(), "t", weir.TopicChange{TombstoneTTL: &now}))
	upkeep(t, c)
	if hasStone() {
		t.Error("a tombstone past its time is left")
	}
	if _, ok, err := c.Current(t.Context(), "t", "k0"); err != nil || ok {
		t.Errorf("a key whose tombstone was removed is back: %v, %v", ok, err)
	}
	if _, ok, err := c.Current(t.Context(), "t", "k1"); err != nil || !ok {
		t.Errorf("k1 is there: %v, %v", ok, err)
	}
	noError(t, c.CreateTopic(t.Context(), "plain", nil))
	_, _, err = c.Current(t.Context(), "plain", "k")
	wantError(t, err, weir.ErrInvalid, "not compacted")
}

func sortedPairs(m map[string]string) []string {
	var list []string
	for k, v := range m {
		list = append(list, k+"="+v)
	}
	slices.Sort(list)
	return list
}

// TestCheckWhileSegmentsChange: the invariants hold in a snapshot from before segments and topics came and went.
func TestCheckWhileSegmentsChange(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, ownUpkeep)
	ctx := t.Context()
	noError(t, c.CreateTopic(ctx, "stays", &weir.TopicOptions{SegmentSize: 1000, RetentionBytes: 1}))
	noError(t, c.CreateTopic(ctx, "goes", &weir.TopicOptions{SegmentSize: 1000}))
	for range 5 {
		produced(t, c, "stays", numbers(500)...)
		produced(t, c, "goes", numbers(500)...)
	}
	noError(t, c.CreateGroup(ctx, "goes", "g", &weir.GroupOptions{Mode: weir.Queue}))
	claimOne(t, connect(t, dsn), "goes", "g", "c", 1, "1 hour")
	old := connect(t, dsn)
	execute(t, old, "begin isolation level repeatable read")
	execute(t, old, "select 1")
	conn := connect(t, dsn)
	upkeepUntil(t, c, "a segment is dropped", func() bool {
		noError(t, second(c.Read(ctx, "stays", 2500, 1))) // moves the fence
		return value[bool](t, conn, "select to_regclass('weir.log_1_1') is null")
	})
	for range 5 {
		produced(t, c, "stays", numbers(500)...)
	}
	noError(t, second(c.DropTopic(ctx, "goes", &weir.DropOptions{Force: true})))
	noError(t, c.CreateTopic(ctx, "comes", nil))
	for _, file := range sql.List("check") {
		rows, err := old.Query(ctx, sql.Text(sql.DefaultSchema, file))
		noError(t, err)
		for rows.Next() {
			values, err := rows.Values()
			noError(t, err)
			t.Errorf("%s: %v", file, values)
		}
		noError(t, rows.Err())
	}
	execute(t, old, "rollback")
}

// Any number of processes do the upkeep at once, with topics and groups being made, filled, altered and dropped: no deadlock, no error.
func TestMaintainers(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, ownUpkeep)
	length := 5 * time.Second
	if longRun() {
		length = time.Minute
	}
	var (
		wrong errorsOf
		tasks sync.WaitGroup
		mu    sync.Mutex
		did   = map[string]int{}
	)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	call := context.WithoutCancel(t.Context())
	actions := []string{"sealed", "emptied", "dropped", "extended", "compacted"}
	tasks.Go(func() { // a busy machine takes longer to come to all of them
		for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			mu.Lock()
			all := !slices.ContainsFunc(actions, func(a string) bool { return did[a] == 0 })
			mu.Unlock()
			if took := time.Since(began); all && took > length || took > length+2*time.Minute {
				stop()
				return
			}
		}
	})
	for range 8 {
		via := openDSN(t, dsn, ownUpkeep)
		tasks.Go(func() {
			for ctx.Err() == nil {
				done, due, err := via.Maintain(call)
				if err != nil {
					wrong.add("maintain: %w", err)
					return
				}
				mu.Lock()
				did[done.Action]++
				mu.Unlock()
				if !due {
					time.Sleep(time.Millisecond)
				}
			}
		})
	}
	for range 2 {
		conn := connect(t, dsn)
		tasks.Go(func() {
			for ctx.Err() == nil {
				if _, err := conn.Exec(call, "select * from weir.maintain()"); err != nil {
					wrong.add("weir.maintain: %w", err)
					return
				}
			}
		})
	}
	for i := range 4 {
		compact, conn := i%2 == 0, connect(t, dsn)
		tasks.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				topic := fmt.Sprint("t", i)
				o := &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Second, DropUnread: true, Compact: compact}
				err := c.CreateTopic(call, topic, o)
				for _, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
					if err == nil {
						err = c.CreateGroup(call, topic, string(mode), &weir.GroupOptions{Mode: mode})
					}
				}
				for turn := range 8 {
					ms := numbers(500)
					for j := range ms {
						ms[j].Key = fmt.Sprint("k", j%10)
						if j%7 == 0 {
							ms[j].IdempotencyKey = fmt.Sprint(n, "/", j)
						}
					}
					if err == nil {
						_, err = c.Produce(call, topic, ms...)
					}
					if err == nil {
						_, err = c.Seek(call, topic, "stream", weir.Beginning())
					}
					if compact { // what a group has yet to get is not compacted
						for _, mode := range []weir.Mode{weir.Stream, weir.Ordered, weir.Queue} {
							if err == nil {
								_, err = c.Seek(call, topic, string(mode), weir.Head())
							}
						}
					}
					if err == nil {
						age := time.Duration(1+turn%3) * time.Second
						err = c.AlterTopic(call, topic, weir.TopicChange{RetentionAge: &age})
					}
					if err == nil && turn%2 == 1 {
						// What is sealed meanwhile is old.
						_, err = conn.Exec(call, `
							update weir.segment set last_at = last_at - interval '1 hour'
							where topic_id = (select id from weir.topic where name = $1)`, topic)
						time.Sleep(20 * time.Millisecond)
					}
				}
				if err == nil {
					_, err = c.DropGroup(call, topic, "queue", &weir.DropOptions{Force: true})
				}
				if err == nil {
					_, err = c.DropTopic(call, topic, &weir.DropOptions{Force: true})
				}
				var pg *pgconn.PgError
				if err != nil && !(errors.As(err, &pg) && pg.Code == "55P03") {
					wrong.add("topic %s: %w", topic, err)
					return
				}
			}
		})
	}
	tasks.Wait()
	wrong.none(t)
	t.Logf("done: %v", did)
	for _, action := range actions {
		if did[action] == 0 {
			t.Errorf("nothing was %s", action)
		}
	}

	// Suspended: nothing happens, however much is due.
	topicAndGroup(t, c, "last", "g", &weir.TopicOptions{SegmentSize: 1000}, nil)
	if changed, err := c.SuspendMaintenance(t.Context(), true); err != nil || !changed {
		t.Fatal(changed, err)
	}
	if changed, err := c.SuspendMaintenance(t.Context(), true); err != nil || changed {
		t.Errorf("suspended twice: %v, %v", changed, err)
	}
	if since, err := c.MaintenanceSuspended(t.Context()); err != nil || since == nil || time.Since(*since) > time.Minute {
		t.Errorf("suspended since %v, %v", since, err)
	}
	produced(t, c, "last", numbers(3500)...)
	conn := connect(t, dsn)
	before := parts(t, conn, "last")
	if all := upkeep(t, c); len(all) > 0 {
		t.Errorf("suspended maintenance did %v", all)
	}
	if after := parts(t, conn, "last"); !slices.Equal(before, after) {
		t.Errorf("segments were %v and are %v", before, after)
	}
	if changed, err := c.SuspendMaintenance(t.Context(), false); err != nil || !changed {
		t.Fatal(changed, err)
	}
	sealedUpTo(t, c, conn, "last", 3)
	if since, err := c.MaintenanceSuspended(t.Context()); err != nil || since != nil {
		t.Errorf("suspended since %v, %v", since, err)
	}
}

// What is dropped is gone at once, whoever uses it; its tables go when they can.
func TestDropUnderLoad(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"topic", "group"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c, dsn := open(t, ownUpkeep)
			q := connect(t, dsn)
			for round := range 8 {
				// "slow" holds the log of the first consumers' topic only now and then.
				topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000}, nil)
				noError(t, c.CreateGroup(t.Context(), "t", "ordered", &weir.GroupOptions{Mode: weir.Ordered}))
				noError(t, c.CreateGroup(t.Context(), "t", "queue", &weir.GroupOptions{Mode: weir.Queue}))
				var tasks sync.WaitGroup
				ends := make(chan error, 16)
				var handled, stored atomic.Int64
				ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
				for _, g := range []string{"g", "ordered", "queue"} {
					k, err := c.NewConsumer("t", g, weir.Handle(func(context.Context, *weir.Received[int]) error { handled.Add(1); return nil }),
						&weir.ConsumerOptions{Concurrency: 2, PollInterval: 10 * time.Millisecond, StopTimeout: time.Second})
					noError(t, err)
					tasks.Go(func() { ends <- k.Run(ctx) })
				}
				producing, stopProducing := context.WithCancel(ctx)
				failures := make(chan error, 4)
				for range 4 {
					tasks.Go(func() {
						for producing.Err() == nil {
							ms := numbers(20)
							for i := range ms {
								ms[i].Key = strconv.Itoa(i)
							}
							if _, err := c.Produce(ctx, "t", ms...); err != nil {
								failures <- err
								return
							}
							stored.Add(20)
						}
						failures <- nil
					})
				}
				eventually(t, "all are at work", func() bool {
					return handled.Load() > 200 && stored.Load() > 1000 &&
						value[int](t, q, "select count(*)::int from weir.consumer where backend is not null") == 3
				})
				if what == "topic" {
					_, err := c.DropTopic(t.Context(), "t", nil)
					wantError(t, err, weir.ErrInUse, "live")
					began := time.Now()
					if dropped, err := c.DropTopic(t.Context(), "t", &weir.DropOptions{Force: true}); err != nil || !dropped {
						t.Fatal(dropped, err)
					}
					if took := time.Since(began); took > 3*time.Second {
						t.Errorf("dropping took %v", took)
					}
					for range 4 {
						wantError(t, <-failures, weir.ErrTopicNotFound)
					}
					for range 3 {
						wantError(t, <-ends, weir.ErrTopicNotFound)
					}
				} else {
					for _, g := range []string{"g", "ordered", "queue"} {
						_, err := c.DropGroup(t.Context(), "t", g, nil)
						wantError(t, err, weir.ErrInUse, "live")
						if dropped, err := c.DropGroup(t.Context(), "t", g, &weir.DropOptions{Force: true}); err != nil || !dropped {
							t.Fatal(dropped, err)
						}
						wantError(t, <-ends, weir.ErrGroupNotFound, g)
						// The name is free at once.
						noError(t, c.CreateGroup(t.Context(), "t", g, &weir.GroupOptions{Mode: weir.Stream}))
					}
					stopProducing()
					for range 4 {
						noError(t, <-failures)
					}
				}
				stopProducing()
				stop()
				tasks.Wait()
				if what == "group" {
					for _, table := range []string{"lease", "shard_range", "delivery"} {
						if n := value[int](t, q, "select count(*)::int from weir."+table+" as x where not exists (select from weir.consumer_group as g where g.id = x.group_id)"); n > 0 {
							t.Errorf("round %d: %d rows of weir.%s are left", round, n, table)
						}
					}
					if _, err := c.DropTopic(t.Context(), "t", &weir.DropOptions{Force: true}); err != nil {
						t.Fatal(err)
					}
				}
				if n := value[int](t, q, "select count(*)::int from weir.topics"); n != 0 {
					t.Errorf("%d topics are listed", n)
				}
			}
			upkeepUntil(t, c, "nothing is left", func() bool {
				return value[int](t, q, `
					select ((select count(*) from weir.topic) + (select count(*) from weir.segment) + (select count(*) from weir.fence)
					    + (select count(*) from pg_class where relnamespace = 'weir'::regnamespace and relname ~ '^log_[0-9]'))::int`) == 0
			})
		})
	}

	// A hundred and fifty segments: some at a time, and an interruption is made up for.
	t.Run("in steps", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		q := connect(t, dsn)
		topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000}, nil)
		produced(t, c, "t", numbers(10)...)
		id := value[int](t, q, "select id from weir.topic")
		for at := 10_000; at <= 150_000; at += 10_000 {
			execute(t, q, "select weir.extend_log($1::int, $2::bigint)", id, at)
		}
		left := func() int {
			return value[int](t, q, "select count(*)::int from pg_class where relname ~ '^log_[0-9]+_[0-9]+$' and relkind = 'r'")
		}
		if n := left(); n < 150 {
			t.Fatalf("%d segments", n)
		}
		if dropped, err := c.DropTopic(t.Context(), "t", nil); err != nil || !dropped {
			t.Fatal(dropped, err)
		}
		n := left()
		if n == 0 || n < 120 {
			t.Fatalf("%d segments are left after the first step", n)
		}
		_, err := c.Topic(t.Context(), "t")
		wantError(t, err, weir.ErrTopicNotFound)
		// The name is free.
		topicAndGroup(t, c, "t", "g", nil, nil)
		ids := produced(t, c, "t", numbers(3)...)
		// One is killed in the middle of a step.
		killed := connect(t, dsn)
		execute(t, killed, "begin")
		execute(t, killed, "select * from weir.maintain()")
		execute(t, q, "select pg_terminate_backend($1)", killed.PgConn().PID())
		if _, err := killed.Exec(t.Context(), "commit"); err == nil {
			t.Fatal("it was not killed")
		}
		eventually(t, "it is gone", func() bool {
			return !value[bool](t, q, "select exists (select from pg_stat_activity where pid = $1)", killed.PgConn().PID())
		})
		if got := left() - 2; got != n {
			t.Errorf("%d segments are left after an interrupted step, want %d", got, n)
		}
		steps := 0
		for _, u := range upkeep(t, c) {
			if u.Action == "dropped" {
				steps++
			}
		}
		if got := left(); got != 2 || steps < 6 {
			t.Errorf("%d segments are left after %d steps, want the two of the new topic", got, steps)
		}
		if got := takeAll(t, q, "t", "g", "x"); !slices.Equal(got, ids) {
			t.Errorf("the new topic has %v, want %v", got, ids)
		}
	})

	// A reader, and a producer that is open, hold up the tables and not the caller.
	t.Run("held", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		q := connect(t, dsn)
		topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000}, nil)
		produced(t, c, "t", numbers(10)...)
		reader := start(t, connect(t, dsn))
		execute(t, reader, "declare held cursor for select id from weir.log_1")
		execute(t, reader, "fetch 1 from held")
		producer := start(t, connect(t, dsn))
		execute(t, producer, "select weir.produce('t', '1', idempotency_key => 'late')")
		// Neither does whoever was about to make a group.
		late := start(t, connect(t, dsn))
		execute(t, late, "select weir.topic_named('t')")
		began := time.Now()
		if dropped, err := c.DropTopic(t.Context(), "t", nil); err != nil || !dropped {
			t.Fatal(dropped, err)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("dropping took %v", took)
		}
		if done, due, err := c.Maintain(t.Context()); err != nil || !due || done.Action != "postponed" {
			t.Errorf("maintenance says %+v, %v, %v, want postponed", done, due, err)
		}
		noError(t, c.CreateTopic(t.Context(), "t", nil))
		execute(t, reader, "fetch 1 from held")
		noError(t, reader.Commit(t.Context()))
		noError(t, producer.Commit(t.Context()))
		if all := upkeep(t, c); !did(all, "dropped") {
			t.Errorf("upkeep did %v, want the topic dropped", all)
		}
		if n := value[int](t, q, "select (select count(*) from weir.idempotency)::int + (select count(*) from weir.topic)::int"); n != 1 {
			t.Errorf("%d rows are left, want the new topic's", n)
		}
	})

	// A group that is being made while its topic is dropped: one of them comes first.
	t.Run("registration", func(t *testing.T) {
		t.Parallel()
		c, dsn := open(t, ownUpkeep)
		q, a, b := connect(t, dsn), connect(t, dsn), connect(t, dsn)
		for range 2 {
			noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000}))
			// A reader keeps the tables, so that the topic is still there.
			reader := start(t, connect(t, dsn))
			execute(t, reader, "select count(*) from "+logOf(t, q, "t"))
			execute(t, a, "begin")
			execute(t, a, "select weir.drop_topic('t')")
			late := sends(t, b, "select weir.create_group('t', 'g')")
			late.blocks(q)
			execute(t, a, "commit")
			err := <-late.done
			var pg *pgconn.PgError
			if err != nil && (!errors.As(err, &pg) || pg.Code != "WE001") {
				t.Errorf("making a group of a topic that is dropped: %v, want WE001", err)
			}
			noError(t, reader.Rollback(t.Context()))
			upkeep(t, c)
			if n := value[int](t, q, "select ((select count(*) from weir.topic) + (select count(*) from weir.consumer_group))::int"); n != 0 {
				t.Errorf("%d topics and groups are left", n)
			}
		}
	})
}

// A key's messages are removed for good, wherever they are; the groups go on.
func TestDeleteKey(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, ownUpkeep)
	q := connect(t, dsn)
	noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Hour}))
	modes := []weir.Mode{weir.Stream, weir.Ordered, weir.Queue}
	for _, mode := range modes {
		noError(t, c.CreateGroup(t.Context(), "t", string(mode), &weir.GroupOptions{Mode: mode, RetryDelay: -1}))
	}
	send := func(n int) (kept, secret []int64) {
		ms := numbers(n)
		for i := range ms {
			ms[i].Key = fmt.Sprint("k", i%5)
			if i%5 == 0 {
				ms[i].Key = "secret"
			}
		}
		for i, id := range produced(t, c, "t", ms...) {
			if i%5 == 0 {
				secret = append(secret, id)
			} else {
				kept = append(kept, id)
			}
		}
		return kept, secret
	}
	// Segment 1 is removed by retention; of each group's, a secret message is dead and one waits for another attempt.
	_, secret := send(1500)
	eventually(t, "all is settled", func() bool {
		id, err := c.After(t.Context(), "t", weir.Head())
		noError(t, err)
		return id == 1500
	})
	for _, mode := range modes {
		failed := 0
		eventually(t, "the group has read all", func() bool {
			for _, l := range claim(t, q, "t", string(mode), "x", 600, "1 hour") {
				for _, id := range column[int64](t, q, "select id from weir.fetch($1) where key = 'secret'", l.ID) {
					if failed < 2 && value[bool](t, q, "select weir.fail($1, 'x', $2, 'no', '1 hour', $3)", l.ID, id, map[int]string{0: "dead", 1: "retry"}[failed]) {
						failed++
						break
					}
				}
				ack(t, q, l.ID, "x")
			}
			return value[bool](t, q, "select claimed = 1500 and leases = 0 and (waiting = 0 or mode = 'ordered') from weir.groups where grp = $1", string(mode))
		})
	}
	upkeepUntil(t, c, "segment 1 is removed", func() bool {
		ageSealed(t, q, "t", 1, "2 hours")
		return parts(t, q, "t")[0].Number > 1
	})
	if n := value[int](t, q, "select count(*)::int from weir.delivery where key = 'secret' and message_id <= 1000"); n == 0 {
		t.Fatal("nothing has survived its segment")
	}
	kept, more := send(2000)
	secret = append(secret, more...)
	eventually(t, "all is settled", func() bool {
		id, err := c.After(t.Context(), "t", weir.Head())
		noError(t, err)
		return id == 3500
	})
	// While one is held, and another is being handled and will fail.
	held := map[weir.Mode][]claimed{}
	for _, mode := range modes {
		held[mode] = claim(t, q, "t", string(mode), "x", 50, "1 hour")
		if len(held[mode]) == 0 {
			t.Fatalf("%s: nothing is handed out", mode)
		}
	}
	calls := 0
	deleted, err := c.DeleteKey(t.Context(), "t", "secret", func(int, int64) { calls++ })
	noError(t, err)
	if deleted != 100+400 || calls < 3 {
		t.Errorf("%d messages were deleted in %d segments, want 500", deleted, calls)
	}
	if n := value[int](t, q, "select (select count(*) from weir.log_1 where key = 'secret')::int + (select count(*) from weir.delivery where key = 'secret')::int"); n != 0 {
		t.Errorf("%d copies of what was to be deleted are left", n)
	}
	for _, mode := range modes {
		y := newTally()
		for _, l := range held[mode] {
			ids, err := q.Query(t.Context(), "select id from weir.fetch($1)", l.ID)
			noError(t, err)
			list, err := pgx.CollectRows(ids, pgx.RowTo[int64])
			var pg *pgconn.PgError
			if errors.As(err, &pg) && pg.Code == "WE010" && mode == weir.Queue {
				continue // that was the delivery itself
			}
			noError(t, err)
			if !ack(t, q, l.ID, "x") && len(list) > 0 {
				t.Errorf("%s: a lease was lost", mode)
			}
			y.add(list...)
		}
		execute(t, q, "update weir.delivery set due_at = clock_timestamp() where state in ('ready', 'parked')")
		y.add(takeAll(t, q, "t", string(mode), "y")...)
		if missing := y.missing(kept); len(missing) > 0 {
			t.Errorf("%s: %d messages of other keys were not handled", mode, len(missing))
		}
		for _, id := range secret {
			if y.count(id) > 0 {
				t.Errorf("%s: deleted message %d was handled", mode, id)
				break
			}
		}
	}

	// A consumer at work while messages of a key are deleted, some of which fail: it goes on.
	began, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	handled := newTally()
	for _, mode := range modes {
		consume(t, c, "t", string(mode), weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
			if m.Key == "secret" {
				once.Do(func() { close(began) })
				<-goOn
				return errors.New("it fails")
			}
			handled.add(m.ID)
			return nil
		}), &weir.ConsumerOptions{Concurrency: 4})
	}
	kept, _ = send(500)
	<-began
	if _, err := c.DeleteKey(t.Context(), "t", "secret", nil); err != nil {
		t.Fatal(err)
	}
	close(goOn)
	after, _ := send(100)
	eventually(t, "all others are handled by each group", func() bool {
		for _, id := range append(slices.Clone(kept), after[len(after)-1]) {
			if handled.count(id) < len(modes) {
				return false
			}
		}
		return true
	})
	wantError(t, second(c.DeleteKey(t.Context(), "missing", "k", nil)), weir.ErrTopicNotFound)
}

// cpuOf is the time that a process and its children have computed, where /proc tells it.
func cpuOf(pid int) time.Duration {
	ticks := 0
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range stats {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		// The name of the program, in parentheses, may contain anything.
		_, rest, _ := strings.Cut(string(text[bytes.LastIndexByte(text, ')')+1:]), " ")
		fields := strings.Fields(rest)
		own := name == fmt.Sprintf("/proc/%d/stat", pid)
		if !own && fields[1] != strconv.Itoa(pid) {
			continue
		}
		for i := 11; i < map[bool]int{true: 15, false: 13}[own]; i++ {
			n, _ := strconv.Atoi(fields[i])
			ticks += n
		}
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// A thousand idle topics: nothing is written, and next to nothing asked.
func TestManyTopics(t *testing.T) {
	topics, polled := 250, 24
	if longRun() {
		topics, polled = 1000, 48
	}
	s := pgtest.New(t, &pgtest.Options{Fast: true, Settings: map[string]string{"autovacuum": "off"}})
	c, dsn := openOn(t, s, ownUpkeep)
	q := connect(t, dsn)
	// A transaction's worth of locks at a time.
	for at := 1; at <= topics; at += 25 {
		execute(t, q, `
			select weir.create_topic('t' || i), weir.create_group('t' || i, 'a'), weir.create_group('t' || i, 'b')
			from generate_series($1::int, $2::int) as i`, at, min(at+24, topics))
	}
	execute(t, q, "vacuum analyze")
	pass := func() time.Duration {
		began := time.Now()
		if done, due, err := c.Maintain(t.Context()); err != nil || due {
			t.Errorf("an idle install: %+v, %v, %v", done, due, err)
		}
		return time.Since(began)
	}
	upkeep(t, c)
	next := func() int64 {
		return value[int64](t, q, "select pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
	}
	cpu := func() time.Duration { return cpuOf(s.PID()) }

	xid, used := next(), cpu()
	var passes []time.Duration
	for range 10 {
		passes = append(passes, pass())
	}
	used = cpu() - used
	if now := next(); now != xid {
		t.Errorf("ten idle passes of maintenance consumed %d xids", now-xid)
	}
	median := percentile(passes, 0.5)
	t.Logf("%d topics: a pass of maintenance takes %v, %v of the server's CPU", topics, median, used/10)
	if limit := time.Duration(topics) * time.Millisecond / 2; used/10 > limit {
		t.Errorf("an idle pass over %d topics takes %v of the server's CPU, want less than %v", topics, used/10, limit)
	}
	tx := start(t, connect(t, dsn))
	execute(t, tx, "select * from weir.maintain()")
	if n := value[int](t, tx, "select count(*)::int from pg_locks where pid = pg_backend_pid()"); n > 50 {
		t.Errorf("a pass over %d topics leaves its transaction with %d locks", topics, n)
	}
	noError(t, tx.Rollback(t.Context()))

	for i := range polled {
		consume(t, c, fmt.Sprint("t", i+1), "a", weir.Handle(func(context.Context, *weir.Received[int]) error { return nil }), nil)
	}
	// Until all have begun: that they are there is written once.
	eventually(t, "the consumers are there", func() bool { return value[int](t, q, "select count(*)::int from weir.consumer") == polled })
	calls := func() int64 {
		return value[int64](t, q, "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()")
	}
	time.Sleep(1500 * time.Millisecond) // the server's figures come a second late
	xid, used = next(), cpu()
	statements, began := calls(), time.Now()
	time.Sleep(4 * time.Second)
	pass()
	span := time.Since(began)
	t.Logf("%d topics with %d consumers: %.0f statements/s, %.1f%% of a CPU", topics, polled,
		float64(calls()-statements)/span.Seconds(), 100*(cpu()-used).Seconds()/span.Seconds())
	if now := next(); now != xid {
		t.Errorf("idle consumers and a pass of maintenance consumed %d xids", now-xid)
	}
}

// Much that is past its time, on a server that cuts statements short: each pass makes progress.
func TestExpiredBacklog(t *testing.T) {
	t.Parallel()
	messages, size := 200_000, 20_000
	if longRun() {
		messages, size = 10_000_000, 1_000_000
	}
	c, dsn := open(t, ownUpkeep)
	q := connect(t, dsn)
	noError(t, c.CreateTopic(t.Context(), "t", &weir.TopicOptions{SegmentSize: int64(size), RetentionAge: time.Hour}))
	execute(t, q, "update weir.topic set segment_size = $1", size)
	for at := 0; at < messages; at += 10_000 {
		execute(t, q, "select weir.make_room('t', 10000)")
		execute(t, q, "insert into weir.log_1 (payload, produced_at) select to_json(i), clock_timestamp() - interval '1 day' from generate_series(1, 10000) as i")
		execute(t, q, "insert into weir.idempotency (topic_id, key, message_id, expires_at) select 1, $1 || '/' || i, i, clock_timestamp() - interval '1 day' from generate_series(1, 10000) as i", strconv.Itoa(at))
	}
	limited := connect(t, dsn)
	execute(t, limited, "set statement_timeout = '5 s'")
	left := func() [3]int64 {
		return [3]int64{
			value[int64](t, q, "select count(*) from weir.segment where sealed_at is null and low <= $1", messages),
			value[int64](t, q, "select count(*) from weir.segment where low <= $1", messages),
			value[int64](t, q, "select count(*) from weir.idempotency"),
		}
	}
	var longest time.Duration
	passes := map[string]int{}
	for {
		began := time.Now()
		rows, err := limited.Query(t.Context(), "select action from weir.maintain()")
		noError(t, err)
		done, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatalf("after %v: %v", passes, err)
		}
		longest = max(longest, time.Since(began))
		if len(done) == 0 || done[0] == "postponed" {
			if n := left(); n[2] == 0 && n[1] <= 1 {
				break
			} else if time.Since(began) > time.Minute {
				t.Fatalf("nothing is due, and %v are left", n)
			}
			continue
		}
		passes[done[0]]++
	}
	if n := len(logged(t, q, "t")); n != 0 {
		t.Errorf("%d messages are left", n)
	}
	t.Logf("%d messages and %d keys past their time: passes %v, the longest %v", messages, messages, passes, longest)
	if n := passes["expired"]; n < messages/10_000 {
		t.Errorf("%d passes over idempotency keys, want %d", n, messages/10_000)
	}
}

// Thirty days at speed: what is produced in a day stays about a day, and the disk stays as it is.
func TestThirtyDays(t *testing.T) {
	days, day, perDay := 20, time.Second, 5_000
	if longRun() {
		days, day, perDay = 30, 40*time.Second, 1_000_000
	}
	s := pgtest.New(t, &pgtest.Options{Fast: true})
	c, dsn := openOn(t, s, ownUpkeep)
	q := connect(t, dsn)
	topicAndGroup(t, c, "t", "g", &weir.TopicOptions{RetentionAge: day}, nil)
	var handled atomic.Int64
	consume(t, c, "t", "g", weir.HandleBatch(func(_ context.Context, ms []*weir.Received[string]) error {
		handled.Add(int64(len(ms)))
		return nil
	}), &weir.ConsumerOptions{Concurrency: 2, BatchSize: 1000, Prefetch: 10_000})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var tasks sync.WaitGroup
	var wrong errorsOf
	tasks.Go(func() {
		for ctx.Err() == nil {
			_, due, err := c.Maintain(context.WithoutCancel(ctx))
			if err != nil {
				wrong.add("maintain: %w", err)
				return
			}
			if !due {
				time.Sleep(day / 50)
			}
		}
	})
	payload := strings.Repeat("x", 1000)
	var sizes []int64
	began := time.Now()
	for d := range days {
		sent := 0
		for until := began.Add(time.Duration(d+1) * day); sent < perDay; {
			n := min(perDay-sent, perDay/20)
			_, err := c.Copy(t.Context(), "t", func(yield func(weir.Message, error) bool) {
				for range n {
					if !yield(weir.Message{Payload: payload}, nil) {
						return
					}
				}
			})
			noError(t, err)
			sent += n
			time.Sleep(max(0, time.Until(until)) / time.Duration(max(1, (perDay-sent)/n+1)))
		}
		sizes = append(sizes, value[int64](t, q, "select coalesce(sum(pg_total_relation_size(relid)), 0)::bigint from pg_partition_tree('weir.log_1')"))
	}
	took := time.Since(began)
	stop()
	tasks.Wait()
	wrong.none(t)
	drained(t, c, "t", "g")
	if got, want := handled.Load(), int64(days*perDay); got != want {
		t.Errorf("%d messages were handled, want %d", got, want)
	}
	perDayBytes := int64(perDay) * 1100
	var inDays []string
	for _, n := range sizes {
		inDays = append(inDays, fmt.Sprintf("%.1f", float64(n)/float64(perDayBytes)))
	}
	t.Logf("%d days of %v with %d messages took %v; on disk after each, in days: %s", days, day, perDay, took, strings.Join(inDays, " "))
	middle, end := slices.Max(sizes[days/3:2*days/3]), slices.Max(sizes[2*days/3:])
	if end > middle*3/2 || end > 6*perDayBytes {
		t.Errorf("the log took %d bytes in the second third of the time and %d in the last", middle, end)
	}
	if g := group(t, c, "t", "g"); g.Missed != 0 {
		t.Errorf("%d messages were missed", g.Missed)
	}
	p := parts(t, q, "t")
	if !longRun() && p[0].Number == 1 {
		t.Error("no segment was removed")
	}
}
