package weir_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weirhq/weir"
)

// Whoever would need a segment, against its removal, step by step and in both orders: nothing goes that the first one needs, and the
// second finds it gone and begins behind it.
func TestRetentionAndRaces(t *testing.T) {
	t.Parallel()
	const (
		retain  = "select weir.retain(x) from weir.topic as x where x.name = 't'"
		beginRC = "begin isolation level read committed"
		beginRR = "begin isolation level repeatable read"
	)
	// lab is a topic with 1500 messages, the first thousand of which are past their time and handled by the group g.
	type lab struct {
		c                 *weir.Client
		watch, other, ret *pgx.Conn
	}
	setup := func(t *testing.T, unread bool, handled bool) lab {
		c, dsn := open(t, ownUpkeep)
		topicAndGroup(t, c, "t", "g", &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Hour, DropUnread: unread}, &weir.GroupOptions{RetryDelay: -1})
		l := lab{c, connect(t, dsn), connect(t, dsn), connect(t, dsn)}
		execute(t, l.watch, "select weir.produce_many('t', array_fill('1'::json, array[1500]))")
		if handled {
			takeAll(t, l.watch, "t", "g", "x")
		}
		sealedUpTo(t, c, l.watch, "t", 1)
		ageSealed(t, l.watch, "t", 1, "2 hours")
		// Neither waits for the other in secret.
		for _, conn := range []*pgx.Conn{l.other, l.ret} {
			execute(t, conn, "set lock_timeout = '20 s'")
			execute(t, conn, "set deadlock_timeout = '10 s'")
		}
		return l
	}
	left := func(t *testing.T, l lab) int { t.Helper(); return len(logged(t, l.watch, "t")) }
	// one runs an act that needs the segment and leaves its transaction open.
	acts := []struct {
		name, sql, group string
	}{
		{"register at the beginning", "select weir.create_group('t', 'new')", "new"},
		{"register at an id", `select weir.create_group('t', 'new', '{"start": {"id": 1}}')`, "new"},
		{"register at a time", `select weir.create_group('t', 'new', '{"start": {"time": "2000-01-01T00:00:00Z"}}')`, "new"},
		{"seek to the beginning", `select weir.seek('t', 'g', '"beginning"')`, "g"},
		{"seek to an id", `select weir.seek('t', 'g', '{"id": 500}')`, "g"},
		{"seek to a time", `select weir.seek('t', 'g', '{"time": "2000-01-01T00:00:00Z"}')`, "g"},
	}
	for _, act := range acts {
		for _, level := range []string{beginRC, beginRR} {
			name := act.name + map[string]string{beginRC: "", beginRR: ", repeatable read"}[level]
			t.Run(name+", then removal", func(t *testing.T) {
				t.Parallel()
				l := setup(t, false, true)
				execute(t, l.other, level)
				execute(t, l.other, act.sql)
				removal := sends(t, l.ret, retain)
				removal.blocks(l.watch)
				execute(t, l.other, "commit")
				removal.ends()
				if n := left(t, l); n != 1500 {
					t.Fatalf("%d of 1500 messages are left, and the group needs them", n)
				}
				want := 1500
				if act.name == "seek to an id" {
					want = 1001
				}
				if n := len(takeAll(t, l.watch, "t", act.group, "x")); n != want {
					t.Errorf("the group got %d messages, want %d", n, want)
				}
				// And now nobody needs them.
				upkeepUntil(t, l.c, "the segment is removed", func() bool { return parts(t, l.watch, "t")[0].Number > 1 })
			})
			t.Run(name+", rolled back, then removal", func(t *testing.T) {
				t.Parallel()
				l := setup(t, false, true)
				execute(t, l.other, level)
				execute(t, l.other, act.sql)
				removal := sends(t, l.ret, retain)
				removal.blocks(l.watch)
				execute(t, l.other, "rollback")
				removal.ends()
				if n := left(t, l); n != 500 {
					t.Errorf("%d messages are left, want the 500 that are not past their time", n)
				}
			})
			t.Run("removal, then "+name, func(t *testing.T) {
				t.Parallel()
				l := setup(t, false, true)
				execute(t, l.other, level)
				execute(t, l.other, "select 1") // at repeatable read this is the snapshot
				execute(t, l.ret, "begin")
				execute(t, l.ret, retain)
				late := sends(t, l.other, act.sql)
				late.blocks(l.watch)
				execute(t, l.ret, "commit")
				select {
				case err := <-late.done:
					// The cursor may have been moved since the snapshot.
					var pg *pgconn.PgError
					if err != nil && (level == beginRC || !errors.As(err, &pg) || pg.Code != "40001") {
						t.Fatal(err)
					} else if err != nil {
						return
					}
				case <-time.After(30 * time.Second):
					t.Fatal("it still waits")
				}
				execute(t, l.other, "commit")
				upkeep(t, l.c) // the table goes, too
				if ids := takeAll(t, l.watch, "t", act.group, "x"); len(ids) != 500 || ids[0] != 1001 {
					t.Errorf("the group got %d messages, want the 500 from 1001 on", len(ids))
				}
				if g := group(t, l.c, "t", act.group); g.Missed != 0 {
					t.Errorf("%d messages were missed by a group that began behind them", g.Missed)
				}
			})
		}
	}

	// A claim, its acknowledgement, a takeover: while they are not committed, what they began from counts.
	for _, step := range []struct {
		name   string
		before func(t *testing.T, l lab)
		sql    string
		needed bool // the segment is needed after the commit, too
	}{
		{"claim", nil, "select * from weir.claim('t', 'g', 'y', 1000)", true},
		{"claim of the last", func(t *testing.T, l lab) {
			ack(t, l.watch, claimOne(t, l.watch, "t", "g", "x", 900, "1 hour").ID, "x")
		}, "select * from weir.claim('t', 'g', 'y', 1000)", true},
		{
			"acknowledgement", func(t *testing.T, l lab) { claimOne(t, l.watch, "t", "g", "y", 1000, "1 hour") },
			"select weir.ack((select lease_id from weir.leases), 'y')", false,
		},
		{
			"failure of one, and acknowledgement of the others", func(t *testing.T, l lab) { claimOne(t, l.watch, "t", "g", "y", 1000, "1 hour") },
			"select weir.fail(lease_id, 'y', 7, 'no', '1 hour'), weir.ack(lease_id, 'y') from weir.leases", false,
		},
		{"takeover", func(t *testing.T, l lab) {
			claimOne(t, l.watch, "t", "g", "x", 1000, "1 hour")
			expire(t, l.watch)
		}, "select * from weir.claim('t', 'g', 'y', 1000)", true},
		{"split", func(t *testing.T, l lab) {
			claimOne(t, l.watch, "t", "g", "x", 1000, "1 hour")
			expire(t, l.watch)
			execute(t, l.watch, "update weir.consumer_group set split_after = 1")
			execute(t, l.watch, "update weir.lease set attempt = 5")
		}, "select * from weir.claim('t', 'g', 'y', 1000)", false},
	} {
		t.Run(step.name+", uncommitted", func(t *testing.T) {
			t.Parallel()
			l := setup(t, false, false)
			if step.before != nil {
				step.before(t, l)
			}
			execute(t, l.other, "begin")
			execute(t, l.other, step.sql)
			execute(t, l.ret, retain)
			if n := left(t, l); n != 1500 {
				t.Fatalf("%d of 1500 messages are left while it is not decided who needs them", n)
			}
			execute(t, l.other, "commit")
			execute(t, l.ret, retain)
			if n, want := left(t, l), map[bool]int{true: 1500, false: 500}[step.needed]; n != want {
				t.Errorf("%d messages are left after the commit, want %d", n, want)
			}
			if step.name == "split" {
				if n := value[int](t, l.watch, "select count(*)::int from weir.delivery"); n != 1000 {
					t.Errorf("%d deliveries, want one for each message", n)
				}
			}
		})
		t.Run(step.name+", uncommitted, of a topic that drops the unread", func(t *testing.T) {
			t.Parallel()
			l := setup(t, true, false)
			if step.before != nil {
				step.before(t, l)
			}
			execute(t, l.other, "begin")
			execute(t, l.other, step.sql)
			removal := sends(t, l.ret, retain)
			removal.blocks(l.watch)
			execute(t, l.other, "commit")
			removal.ends()
			if n := left(t, l); n != 500 {
				t.Errorf("%d messages are left, want 500", n)
			}
			missed := map[string]int64{"claim of the last": 100, "acknowledgement": 0, "failure of one, and acknowledgement of the others": 0, "split": 0}
			want, ok := missed[step.name]
			if !ok {
				want = 1000
			}
			if g := group(t, l.c, "t", "g"); g.Missed != want || g.Leases != 0 && step.name != "split" {
				t.Errorf("%d messages were missed, want %d; %d leases", g.Missed, want, g.Leases)
			}
		})
		t.Run("removal, then "+step.name, func(t *testing.T) {
			t.Parallel()
			l := setup(t, true, false)
			if step.before != nil {
				step.before(t, l)
			}
			execute(t, l.ret, "begin")
			execute(t, l.ret, retain)
			late := sends(t, l.other, step.sql)
			switch step.name {
			case "acknowledgement":
				late.blocks(l.watch)
			}
			// A takeover skips what is locked, and then waits for the cursor or finds nothing: either way it loses.
			execute(t, l.ret, "commit")
			late.ends()
			g := group(t, l.c, "t", "g")
			if want := map[bool]int64{true: 100, false: 1000}[step.name == "claim of the last"]; g.Missed != want {
				t.Errorf("%d messages were missed, want %d", g.Missed, want)
			}
			execute(t, l.watch, "delete from weir.lease where low < 1000") // none is there
			expire(t, l.watch)
			if ids := takeAll(t, l.watch, "t", "g", "z"); len(ids) != 500 || ids[0] != 1001 {
				t.Errorf("the group got %d messages after the removal, want 500 from 1001 on", len(ids))
			}
		})
	}

	// A dead letter of a group that was moved back: redriven it comes from the log, unless that is being removed.
	t.Run("redrive", func(t *testing.T) {
		t.Parallel()
		for _, first := range []string{"redrive", "removal"} {
			l := setup(t, true, false)
			lease := claimOne(t, l.watch, "t", "g", "x", 1000, "1 hour")
			execute(t, l.watch, "select weir.fail($1, 'x', 7, 'no', null, 'dead'), weir.ack($1, 'x')", lease.ID)
			execute(t, l.watch, `select weir.seek('t', 'g', '"beginning"')`)
			const redrive = "select weir.redrive('t', 'g', 7)"
			if first == "redrive" {
				execute(t, l.other, "begin")
				execute(t, l.other, redrive)
				removal := sends(t, l.ret, retain)
				removal.blocks(l.watch)
				execute(t, l.other, "commit")
				removal.ends()
			} else {
				execute(t, l.ret, "begin")
				execute(t, l.ret, retain)
				late := sends(t, l.other, redrive)
				late.blocks(l.watch)
				execute(t, l.ret, "commit")
				late.ends()
			}
			ids := takeAll(t, l.watch, "t", "g", "y")
			g := group(t, l.c, "t", "g")
			// Before the removal it was one of the log's, and is counted with them; after it, its copy is the last.
			want := map[string]int{"redrive": 500, "removal": 501}[first]
			if len(ids) != want || g.Missed != 1000 || g.Dead != 0 {
				t.Errorf("%s first: the group got %d messages, %d were missed, %d are dead, want %d, 1000, 0", first, len(ids), g.Missed, g.Dead, want)
			}
		}
	})
}

var errForward = errors.New("this would skip messages")

// Groups are made, moved, claim and acknowledge at random while maintenance runs at full speed: each message of each group is handled,
// or counted as missed.
func TestRetentionAtRandom(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("WEIR_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		noError(t, err)
		seed = n
	}
	t.Logf("WEIR_SEED=%d", seed)
	length := 6 * time.Second
	if longRun() {
		length = time.Minute
	}
	c, dsn := open(t, ownUpkeep)
	watch := connect(t, dsn)
	var (
		wrong   errorsOf
		tasks   sync.WaitGroup
		results []func()
	)
	ctx, stop := context.WithTimeout(t.Context(), length)
	defer stop()
	call := context.WithoutCancel(t.Context())
	retry := func(err error) bool {
		var pg *pgconn.PgError
		return errors.As(err, &pg) && (pg.Code == "55P03" || pg.Code == "40001")
	}
	for n, topic := range []string{"kept", "dropped"} {
		unread := topic == "dropped"
		noError(t, c.CreateTopic(t.Context(), topic, &weir.TopicOptions{SegmentSize: 1000, RetentionAge: time.Second, DropUnread: unread}))
		stored := newTally()
		tasks.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(10+n)))
			for ctx.Err() == nil {
				ms := numbers(1 + r.IntN(40))
				for i := range ms {
					ms[i].Key = fmt.Sprint("k", r.IntN(20))
				}
				p, err := c.Produce(call, topic, ms...)
				if err != nil {
					wrong.add("produce: %w", err)
					return
				}
				stored.add(idsOf(p)...)
				time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
			}
		})
		// member works for a group until the end, and moves it back now and then.
		member := func(group string, mode weir.Mode, moves bool, at int64, r *rand.Rand, conn *pgx.Conn) {
			handled := newTally()
			takes := func(most int) (bool, error) {
				rows, err := conn.Query(call, "select * from weir.claim($1, $2, 'm', $3::int, '1 hour')", topic, group, most)
				if err != nil {
					return false, err
				}
				list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[claimed])
				if err != nil {
					return false, err
				}
				for _, l := range list {
					rows, err := conn.Query(call, "select id from weir.fetch($1)", l.ID)
					if err != nil {
						return false, err
					}
					ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
					var pg *pgconn.PgError
					if errors.As(err, &pg) && pg.Code == "WE010" && unread {
						continue // removed from under it
					}
					if err != nil {
						return false, err
					}
					var took bool
					if err := conn.QueryRow(call, "select weir.ack($1, 'm')", l.ID).Scan(&took); err != nil {
						return false, err
					}
					if took {
						handled.add(ids...)
					} else if !unread {
						return false, fmt.Errorf("lease %d was lost", l.ID)
					}
				}
				return len(list) > 0, nil
			}
			for ctx.Err() == nil {
				if _, err := takes(1 + r.IntN(400)); err != nil && !retry(err) {
					wrong.add("%s: group %s: %w", topic, group, err)
					return
				}
				if moves && r.IntN(40) == 0 {
					to := `"beginning"`
					if r.IntN(2) == 0 {
						to = fmt.Sprintf(`{"time": %q}`, time.Now().Add(-time.Duration(r.IntN(3000))*time.Millisecond).Format(time.RFC3339Nano))
					}
					// Back only: what lies before the new position is given up otherwise.
					err := pgx.BeginFunc(call, conn, func(tx pgx.Tx) error {
						var was, now int64
						const here = "select committed, claimed from weir.groups where topic = $1 and grp = $2"
						err := tx.QueryRow(call, here, topic, group).Scan(&was, nil)
						if err == nil {
							_, err = tx.Exec(call, "select weir.seek($1, $2, $3::text::jsonb)", topic, group, to)
						}
						if err == nil {
							err = tx.QueryRow(call, here, topic, group).Scan(nil, &now)
						}
						if err == nil && now > was {
							err = errForward
						}
						return err
					})
					if err != nil && !errors.Is(err, errForward) && !retry(err) {
						wrong.add("%s: seek %s: %w", topic, group, err)
						return
					}
				}
				time.Sleep(time.Duration(r.IntN(map[bool]int{true: 60, false: 15}[unread])) * time.Millisecond)
			}
			wrong.mu.Lock()
			defer wrong.mu.Unlock()
			results = append(results, func() {
				for range 10_000 {
					more, err := takes(5000)
					noError(t, err)
					if !more && value[bool](t, watch, "select lag = 0 and leases = 0 from weir.groups where topic = $1 and grp = $2", topic, group) {
						break
					}
				}
				var ids, missing []int64
				for id := range stored.times {
					if id > at {
						ids = append(ids, id)
					}
				}
				missing = handled.missing(ids)
				missed := value[int64](t, watch, "select missed from weir.groups where topic = $1 and grp = $2", topic, group)
				switch {
				case !unread && (len(missing) > 0 || missed > 0):
					t.Errorf("%s: group %s (%s): %d of %d messages after %d were not handled, %v among them; missed is %d", topic, group, mode, len(missing), len(ids), at, missing[:min(5, len(missing))], missed)
				case unread && !moves && int64(len(missing)) != missed:
					t.Errorf("%s: group %s (%s): %d of %d messages after %d were not handled, and %d are counted as missed", topic, group, mode, len(missing), len(ids), at, missed)
				case !moves && handled.calls() != handled.distinct():
					t.Errorf("%s: group %s (%s): %d messages were handled %d times", topic, group, mode, handled.distinct(), handled.calls())
				}
				t.Logf("%s: group %s (%s): %d messages from %d on, %d handled, %d missed", topic, group, mode, len(ids), at, handled.distinct(), missed)
			})
		}
		modes := []weir.Mode{weir.Stream, weir.Ordered, weir.Queue}
		for i := range 5 {
			mode, moves := modes[i%3], i >= 3
			if moves {
				mode = modes[i-3]
			}
			name := fmt.Sprint("g", i)
			noError(t, c.CreateGroup(t.Context(), topic, name, &weir.GroupOptions{Mode: mode}))
			conn := connect(t, dsn)
			tasks.Go(func() { member(name, mode, moves, 0, rand.New(rand.NewPCG(seed, uint64(100*n+i))), conn) })
		}
		// Newcomers, at the beginning of what there is.
		conns := []*pgx.Conn{connect(t, dsn), connect(t, dsn), connect(t, dsn)}
		tasks.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(50+n)))
			for i, conn := range conns {
				time.Sleep(time.Duration(r.Int64N(int64(length / 4))))
				name, level := fmt.Sprint("new", i), pgx.ReadCommitted
				if r.IntN(2) == 0 && !unread {
					// With drop_unread it begins where its snapshot does, and what was removed since then nobody counts.
					level = pgx.RepeatableRead
				}
				var at int64
				register := func(level pgx.TxIsoLevel) error {
					return pgx.BeginTxFunc(call, conn, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						if _, err := tx.Exec(call, "select weir.create_group($1, $2)", topic, name); err != nil {
							return err
						}
						return tx.QueryRow(call, `
							select c.claimed from weir.cursor as c join weir.consumer_group as g on g.id = c.group_id
							join weir.topic as t on t.id = g.topic_id where t.name = $1 and g.name = $2`, topic, name).Scan(&at)
					})
				}
				err := register(level)
				for err != nil && retry(err) {
					err = register(pgx.ReadCommitted)
				}
				if err != nil {
					wrong.add("%s: register %s: %w", topic, name, err)
					continue
				}
				tasks.Go(func() { member(name, weir.Stream, false, at, rand.New(rand.NewPCG(seed, uint64(1000*n+i))), conn) })
			}
		})
	}
	for range 2 {
		tasks.Go(func() {
			for ctx.Err() == nil {
				_, due, err := c.Maintain(call)
				if err != nil {
					wrong.add("maintain: %w", err)
					return
				}
				if !due {
					time.Sleep(2 * time.Millisecond)
				}
			}
		})
	}
	tasks.Wait()
	wrong.none(t)
	if t.Failed() {
		return
	}
	for _, topic := range []string{"kept", "dropped"} {
		p := parts(t, watch, topic)
		t.Logf("%s: segments up to %d, from %d on", topic, p[len(p)-1].Number, p[0].Number)
		if p[0].Number == 1 {
			t.Errorf("%s: no segment was removed", topic)
		}
	}
	for _, check := range results {
		check()
	}
}
