package sql_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/sql"
)

// The tests of this file put the log under settings, failures and operations that it does not choose: other isolation
// levels, standbys, dumps, replicas, altered sequences, crashes. Each must end right or with an error that says what to do.
// Each has a server of its own, so that they can run side by side.

// slow is how long a message may wait, on a busy machine, for what does not concern it.
const slow = 5 * time.Second

// install makes a database with one topic and one group. The first of a server is the template of the others.
func install(t testing.TB, server *pgtest.Server, database string) {
	t.Helper()
	ctx := context.Background()
	err := server.Exec(ctx, "postgres", "create database "+database+" template installed")
	if code(err) == "3D000" {
		migrate(t, server, "installed")
		for _, text := range []string{
			`select weir.create_topic('t', '{"segment_size": 1000}')`,
			`select weir.create_group('t', 'g', '{"max_attempts": 3, "retry_delay": "0 s"}')`,
		} {
			if err := server.Exec(ctx, "installed", text); err != nil {
				t.Fatal(err)
			}
		}
		err = server.Exec(ctx, "postgres", "create database "+database+" template installed")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// migrate makes a database with nothing but the schema.
func migrate(t testing.TB, server *pgtest.Server, database string) {
	t.Helper()
	ctx := context.Background()
	if err := server.CreateDatabase(ctx, database); err != nil {
		t.Fatal(err)
	}
	c, err := weir.Open(ctx, server.DSN(database), &weir.Options{Migrate: true, NoListen: true})
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// on plays steps on a database of any server, and then demands that every invariant holds there.
func on(t testing.TB, server *pgtest.Server, database string, steps func(b *bench)) {
	t.Helper()
	b := &bench{lab: &lab{t: t, server: server}, database: database, got: map[int64]int{}}
	defer func() {
		for _, s := range b.sessions {
			s.close()
		}
	}()
	defer func() {
		if v := recover(); v != nil {
			f, ok := v.(failure)
			if !ok {
				panic(v)
			}
			t.Fatalf("%s: %v", database, f.err)
		}
	}()
	b.watching()
	steps(b)
	b.invariants()
}

// invariants demands that every file of check gives no row.
func (b *bench) invariants() {
	for _, file := range sql.List("check") {
		rows, err := b.watch.Query(context.Background(), sql.Text(sql.DefaultSchema, file))
		if err != nil {
			b.failf("%s: %w", file, err)
		}
		found, err := pgx.CollectRows(rows, pgx.RowToMap)
		if err != nil {
			b.failf("%s: %w", file, err)
		}
		if len(found) > 0 {
			b.failf("%s: %v", file, found)
		}
	}
}

// reconnect gives a bench new sessions after the server's end.
func (b *bench) reconnect() {
	for _, s := range b.sessions {
		s.close()
	}
	b.sessions = nil
	b.until("the server takes connections", func() bool {
		s, err := pgx.Connect(context.Background(), b.lab.server.DSN(b.database))
		if err != nil {
			return false
		}
		_ = s.Close(context.Background())
		return true
	})
	b.watching()
}

// watching makes the session that watches, which no default isolation level is to disturb.
func (b *bench) watching() {
	s := b.session("watch")
	s.do("set default_transaction_isolation = 'read committed'")
	b.watch = s.conn
}

// rise is a watch on the settled head and the cursors, which must not go down.
type rise struct {
	b       *bench
	settled int64
	claimed map[string]int64
}

func (b *bench) rise() *rise { return &rise{b: b, claimed: map[string]int64{}} }

func (r *rise) look() {
	now := r.b.settled()
	if now < r.settled {
		r.b.failf("fall: the settled head went from %d to %d", r.settled, now)
	}
	r.settled = now
	rows, err := r.b.watch.Query(context.Background(), "select t.name || '/' || g.name, c.claimed from weir.cursor as c join weir.consumer_group as g on g.id = c.group_id join weir.topic as t on t.id = g.topic_id")
	if err != nil {
		r.b.failf("cursors: %w", err)
	}
	var name string
	var claimed int64
	if _, err := pgx.ForEachRow(rows, []any{&name, &claimed}, func() error {
		if claimed < r.claimed[name] {
			return fmt.Errorf("fall: the cursor of %s went from %d to %d", name, r.claimed[name], claimed)
		}
		r.claimed[name] = claimed
		return nil
	}); err != nil {
		r.b.failf("cursors: %w", err)
	}
}

// expect demands an error of that SQLSTATE with a hint, and returns the hint.
func (b *bench) expect(err error, want, what string) string {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != want {
		b.failf("%s: got %v, want %s", what, err, want)
	}
	if pg.Hint == "" {
		b.failf("%s: %s has no hint: %s", what, want, pg.Message)
	}
	return pg.Hint
}

// obey runs the statement in a hint.
func (s *session) obey(hint string) {
	text, ok := strings.CutPrefix(hint, "Run: ")
	if !ok {
		s.b.failf("the hint has no statement: %s", hint)
	}
	text, _, _ = strings.Cut(text, ";")
	s.do(text)
}

// expire ends all leases.
func (s *session) expire() {
	s.do("update weir.lease set expires_at = clock_timestamp()")
	s.do("update weir.delivery set due_at = clock_timestamp() where state = 'leased'")
}

// looked takes turns that take nothing until the fence waits for the producers that it has seen.
func (b *bench) looked(c *session, m mode) {
	b.until("the producers at work were looked for", func() bool {
		c.poll(m, 0)
		return value[bool](b.sessions[0], "select coalesce(bool_or(looked and pending is not null), false) from weir.fence_rows")
	})
}

// burn uses up that many xids.
func burn(t testing.TB, server *pgtest.Server, xids int) {
	t.Helper()
	err := server.Exec(context.Background(), "postgres", fmt.Sprintf(
		"do $$ begin perform set_config('synchronous_commit', 'off', false); for i in 1..%d loop perform pg_current_xact_id(); commit; end loop; end $$", xids))
	if err != nil {
		t.Fatal(err)
	}
}

// pipe runs a program of the server's installation.
func pipe(t testing.TB, server *pgtest.Server, stdin []byte, name string, args ...string) []byte {
	t.Helper()
	cmd := server.Command(name, args...)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, errs.String())
	}
	return out.Bytes()
}

// TestDump: what was dumped while a producer was at work and a pair was waiting for its proof goes on where it is
// restored: in a cluster with lower xids, in one with higher ones, and in the same under another name, while the producer
// of the original goes on for as long as it likes.
func TestDump(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	source := pgtest.New(t, &pgtest.Options{Fast: true})
	other := pgtest.New(t, &pgtest.Options{Fast: true})
	burn(t, source, 5_000)
	for i, seen := range []bool{false, true} {
		database := fmt.Sprintf("source_%d", i)
		install(t, source, database)
		on(t, source, database, func(b *bench) {
			p, q, c := b.session("p"), b.session("q"), b.session("c")
			for range 10 {
				p.produce()
			}
			first := c.poll(own, 4)
			if len(first) != 1 || *first[0].High != 4 {
				b.failf("expected a claim of four, got %+v", first)
			}
			lease := *first[0].ID
			c.do("select weir.fail($1, 'c', 2, 'cannot be', outcome => 'dead')", lease)
			c.do("select weir.fail($1, 'c', 3, 'not now', '0 s')", lease)
			c.do("select weir.ack($1, 'c')", lease)
			b.got[1], b.got[2], b.got[4] = 1, 1, 1
			if held := c.poll(own, 100); len(held) != 2 { // message 3 again, and a range
				b.failf("expected a delivery and a range, got %+v", held)
			}
			p.do("begin")
			open := p.produce()
			q.produce()
			c.poll(own, 0)
			if seen {
				b.looked(c, own)
			}
			if at := b.settled(); at >= open {
				b.failf("settled is %d, and %d is open", at, open)
			}
			got := maps.Clone(b.got)
			plainText := pipe(t, source, nil, "pg_dump", "-d", database)
			custom := pipe(t, source, nil, "pg_dump", "-Fc", "-d", database)
			n := 0
			restored := func(what string, server *pgtest.Server, m mode, isolation string) {
				n++
				name := fmt.Sprintf("restored_%d_%d", i, n)
				if err := server.CreateDatabase(ctx, name); err != nil {
					t.Fatal(err)
				}
				if n%2 == 0 {
					pipe(t, server, plainText, "psql", "-q", "-X", "-v", "ON_ERROR_STOP=1", "-d", name)
				} else {
					pipe(t, server, custom, "pg_restore", "--exit-on-error", "-d", name)
				}
				isolate(t, server, name, isolation)
				t.Run(fmt.Sprintf("seen %v/%s/%v %s", seen, what, m, isolation), func(t *testing.T) {
					on(t, server, name, func(b *bench) { goOn(b, m, got, open) })
				})
			}
			if seen {
				restored("lower xids", other, own, "read committed")
				restored("same cluster", source, own, "read committed")
			} else {
				restored("lower xids", other, own, "repeatable read")
			}
			restored("lower xids", other, plain, "read committed")
			restored("same cluster", source, plain, "read committed")
			if seen {
				burn(t, other, 15_000)
				restored("higher xids", other, own, "read committed")
				restored("higher xids", other, plain, "serializable")
			}
			p.do("commit")
			c.expire()
			b.drain(own)
		})
	}
}

// isolate sets the default isolation level of a database.
func isolate(t testing.TB, server *pgtest.Server, database, isolation string) {
	t.Helper()
	if err := server.Exec(context.Background(), "postgres", fmt.Sprintf("alter database %s set default_transaction_isolation = '%s'", database, isolation)); err != nil {
		t.Fatal(err)
	}
}

// goOn takes a restored database to the end of its log, and then drops what is in it. got is what had been handed out, open
// the id of a producer that was at work then and is not part of it.
func goOn(b *bench, m mode, got map[int64]int, open int64) {
	b.got = maps.Clone(got)
	p, q, c := b.session("p"), b.session("q"), b.session("c")
	if value[string](c, "select string_agg(message_id || ' ' || error, ',') from weir.dead_letters") != "2 cannot be" {
		b.failf("the dead letter is not what it was")
	}
	if n := value[int](c, "select count(*)::int from weir.log_1"); n != 11 {
		b.failf("%d messages were restored, not 11", n)
	}
	r := b.rise()
	r.look()
	c.expire()
	began := time.Now()
	for len(b.got) < 11 { // also while the original's producer goes on
		c.take(m)
		r.look()
		if waited := time.Since(began); waited > slow {
			b.failf("stalled: %d of 11 messages after %v, settled head %d", len(b.got), waited, b.settled())
		}
	}
	q.do("begin")
	held := q.produce()
	if held <= open+1 {
		b.failf("id %d was issued again", held)
	}
	p.produce()
	c.take(m)
	c.take(m)
	r.look()
	if b.settled() >= held {
		b.failf("settled is %d, and %d is open", b.settled(), held)
	}
	q.do("commit")
	b.drain(m)
	r.look()
	if n := value[int](c, "select weir.redrive('t', 'g')::int"); n != 1 {
		b.failf("%d dead letters were given another life, not 1", n)
	}
	delete(b.got, 2)
	b.drain(m)

	c.do("select weir.create_topic('second')")
	c.do("select weir.create_group('second', 'g')")
	p.do("select weir.produce('second', '1')")
	c.do("select weir.drop_group('t', 'g')")
	if !value[bool](c, "select weir.drop_topic('t')") || value[bool](c, "select to_regclass('weir.log_1') is not null or to_regclass('weir.log_1_id') is not null") {
		b.failf("the topic was not dropped")
	}
	b.until("the second topic's message is handed out", func() bool {
		return value[int](c, "select count(*)::int from weir.claim('second', 'g', 'c')") == 1
	})
}

// TestManySubtransactions: hundreds of savepoints, more than a snapshot lists, hide no producer from either proof; a COPY of
// ten thousand is one producer like any other.
func TestManySubtransactions(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, m := range modes {
		for i, end := range []string{"commit", "rollback", "prepare"} {
			byLock := i > 0 || m == own
			t.Run(fmt.Sprintf("savepoints/%v/by lock %v/%s", m, byLock, end), func(t *testing.T) {
				if err := l.play(func(b *bench) { manySavepoints(b, m, byLock, end) }, nil); err != nil {
					t.Error(err)
				}
			})
		}
		t.Run("copy/"+m.String(), func(t *testing.T) {
			if err := l.play(func(b *bench) { bigCopy(b, m) }, nil); err != nil {
				t.Error(err)
			}
		})
	}
}

func manySavepoints(b *bench, m mode, byLock bool, end string) {
	u, p, q, c := b.session("u"), b.session("p"), b.session("q"), b.session("c")
	r := b.rise()
	q.produce()
	c.take(m)
	if byLock {
		u.do("begin")
		u.do("select pg_current_xact_id()")
	}
	p.do("begin")
	first := int64(0)
	for i := range 300 {
		p.do("savepoint s")
		id := p.produce()
		if first == 0 {
			first = id
		}
		switch i % 3 {
		case 0:
			p.do("rollback to s")
		case 1:
			p.do("release s")
		}
	}
	q.produce()
	if byLock {
		b.looked(c, m)
	}
	for range 3 {
		c.take(m)
		r.look()
	}
	if at := b.settled(); at >= first {
		b.failf("settled is %d, and %d is open", at, first)
	}
	q.produce()
	switch end {
	case "prepare":
		p.do("prepare transaction '" + b.database + "'")
		for range 3 {
			c.take(m)
			r.look()
		}
		if at := b.settled(); at >= first {
			b.failf("settled is %d, and %d is prepared", at, first)
		}
		p.do("commit prepared '" + b.database + "'")
	default:
		p.do(end)
	}
	if byLock { // u is still open
		began := time.Now()
		for b.settled() < first {
			c.take(m)
			r.look()
			if time.Since(began) > slow {
				b.failf("stalled: settled is %d while an unrelated transaction is open", b.settled())
			}
		}
		u.do("rollback")
	}
	b.drain(m)
	r.look()
}

func bigCopy(b *bench, m mode) {
	const rows = 10_000
	p, q, c := b.session("p"), b.session("q"), b.session("c")
	r := b.rise()
	q.produce()
	c.take(m)
	p.do("select weir.make_room('t', $1)", rows)
	p.do("begin")
	payloads := make([][]any, rows)
	for i := range payloads {
		payloads[i] = []any{fmt.Sprint(i)}
	}
	copying := p.beginFunc("copy", func() error {
		_, err := p.conn.CopyFrom(context.Background(), pgx.Identifier{"weir", "log_1"}, []string{"payload"}, pgx.CopyFromRows(payloads))
		return err
	})
	for going := true; going; {
		select {
		case <-copying.done:
			going = false
		default:
		}
		q.produce()
		c.take(m)
		r.look()
	}
	copying.end()
	b.looked(c, m)
	c.take(m)
	r.look()
	p.do("commit")
	for value[int64](b.sessions[0], "select claimed from weir.cursor") < rows {
		for _, l := range c.poll(m, 5000) {
			if l.ID != nil {
				c.fetch(*l.ID)
				c.do("select weir.ack($1, 'c')", *l.ID)
			}
		}
		r.look()
	}
	b.drain(m)
	r.look()
}

// TestRestart: what was seen before the server ended, in whatever way, proves nothing after it. A prepared producer
// outlives the end; one that was only open does not.
func TestRestart(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	server := pgtest.New(t, &pgtest.Options{Fast: true})
	ends := []struct {
		name string
		end  func(b *bench) error
	}{
		{"restart", func(*bench) error { return server.Restart(ctx) }},
		{"crash", func(*bench) error {
			if err := server.Crash(ctx); err != nil {
				return err
			}
			return server.StartAgain(ctx)
		}},
		// A backend that dies takes the others with it, and the server begins anew without another start time.
		{"backend killed", func(b *bench) error {
			v := b.session("victim")
			process, err := os.FindProcess(int(v.pid))
			if err != nil {
				return err
			}
			if err := process.Kill(); err != nil {
				return err
			}
			b.until("the server has noticed", func() bool {
				return v.try("select 1") != nil && b.watch.Ping(ctx) != nil
			})
			return nil
		}},
	}
	for i, e := range ends {
		for _, m := range modes {
			t.Run(e.name+"/"+m.String(), func(t *testing.T) {
				database := fmt.Sprintf("restart_%d_%v", i, m)
				install(t, server, database)
				on(t, server, database, func(b *bench) { restarted(b, m, e.end) })
			})
		}
	}
}

func restarted(b *bench, m mode, end func(b *bench) error) {
	p, o, q, c := b.session("p"), b.session("o"), b.session("q"), b.session("c")
	for range 3 {
		q.produce()
	}
	c.take(m)
	p.do("begin")
	prepared := p.produce()
	o.do("begin")
	o.produce()
	q.produce()
	c.poll(m, 0)
	b.looked(c, m)
	// A second pair, by an observer that cannot have the row of the first.
	late := b.session("late")
	late.do("begin")
	late.do("select from weir.fence for update")
	q.produce()
	c.poll(m, 0)
	late.do("rollback")
	p.do("prepare transaction '" + b.database + "'")
	before := b.settled()
	if err := end(b); err != nil {
		b.lab.t.Fatal(err)
	}
	b.reconnect()
	r := b.rise()
	r.settled = before
	r.look()
	c, q = b.session("c"), b.session("q")
	for range 5 {
		c.take(m)
		r.look()
	}
	q.produce()
	b.looked(c, m)
	for range 3 {
		c.take(m)
		r.look()
	}
	if at := b.settled(); at >= prepared {
		b.failf("settled is %d, and %d is prepared", at, prepared)
	}
	q.do("commit prepared '" + b.database + "'")
	began := time.Now()
	for b.settled() < prepared {
		c.take(m)
		r.look()
		if time.Since(began) > slow {
			b.failf("stalled: settled is %d after the prepared transaction's end", b.settled())
		}
	}
	b.drain(m)
	r.look()
}

// TestCrash: a crash that loses commits which nobody waited for leaves fence, cursors and leases that fit the log, whose
// durable messages are all delivered; ids that it burns hold nothing up.
func TestCrash(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	server := pgtest.New(t, &pgtest.Options{Fast: true})
	for _, m := range modes {
		t.Run(m.String(), func(t *testing.T) {
			database := "crash_" + m.String()
			install(t, server, database)
			on(t, server, database, func(b *bench) {
				crash := func() {
					if err := server.Crash(ctx); err != nil {
						t.Fatal(err)
					}
					if err := server.StartAgain(ctx); err != nil {
						t.Fatal(err)
					}
					b.reconnect()
				}
				// Messages are told apart by their payloads: an id that was lost is issued again.
				stored, handled := map[string]bool{}, map[string]int{}
				numbers := map[int64]bool{} // of leases, also of those that a crash has lost
				n := 0
				produce := func(s *session, lost bool) {
					n++
					payload := fmt.Sprint(n)
					s.do("select weir.produce('t', $1::text::json)", payload)
					if !lost {
						stored[payload] = true
					}
				}
				turn := func(c *session) (got int) {
					for _, l := range c.poll(m, 7) {
						if l.ID == nil {
							continue
						}
						if numbers[*l.ID] {
							b.failf("lease number %d was given out again", *l.ID)
						}
						numbers[*l.ID] = true
						rows, err := c.conn.Query(ctx, "select payload::text from weir.fetch($1)", *l.ID)
						if err != nil {
							b.failf("fetch: %w", err)
						}
						payloads, err := pgx.CollectRows(rows, pgx.RowTo[string])
						if err != nil {
							b.failf("fetch: %w", err)
						}
						if value[bool](c, "select weir.ack($1, $2)", *l.ID, c.name) {
							for _, v := range payloads {
								handled[v]++
								got++
							}
						}
					}
					return got
				}
				rounds := 1
				if m == own {
					rounds = 2
				}
				for round := range rounds {
					p, c := b.session("p"), b.session("c")
					for range 10 {
						produce(p, false)
					}
					turn(c)
					fit := func(when string) {
						var drawn, settled, claimed, highest int64
						if err := b.watch.QueryRow(ctx, `select weir.drawn(1), t.settled, g.claimed, coalesce((select max(id) from weir.log_1), 0)
							from weir.topics as t join weir.groups as g on true`).Scan(&drawn, &settled, &claimed, &highest); err != nil {
							b.failf("%s: %w", when, err)
						}
						if claimed > settled || settled > drawn || highest > drawn {
							b.failf("%s: claimed %d, settled %d, highest %d, drawn %d", when, claimed, settled, highest, drawn)
						}
					}
					fit("before the crash")

					// From here on nothing reaches the disk: the process that writes it is stopped, and nobody waits for it.
					lost := b.freeze()
					p.do("set synchronous_commit = off")
					c.do("set synchronous_commit = off")
					durable := maps.Clone(handled)
					for range 40 {
						produce(p, true)
						turn(c)
					}
					if !lost() {
						b.failf("what was to be lost has been written")
					}
					crash()
					fit("after the crash")
					// An acknowledgement that was lost is made again.
					handled = durable
					p, c = b.session("p"), b.session("c")
					produce(p, false)
					if round == 1 {
						produce(p, false)
					}
					r := b.rise()
					b.until("all that is stored is handled", func() bool {
						turn(c)
						r.look()
						p.expire()
						for v := range stored {
							if handled[v] == 0 {
								return false
							}
						}
						return true
					})
					for v := range handled {
						if !stored[v] {
							b.failf("message %s was handed out, and is not stored", v)
						}
					}

					if round < rounds-1 {
						continue
					}
					// The sequence goes on up to 32 above what it gave out last: nothing waits for those.
					open := b.session("open")
					open.do("begin")
					open.produce()
					p.do("select 1")
					crash()
					p, c = b.session("p"), b.session("c")
					before := b.settled()
					if got := turn(c); got != 0 {
						b.failf("phantom: %d messages", got)
					}
					produce(p, false)
					turn(c)
					turn(c)
					if handled[fmt.Sprint(n)] != 1 {
						b.failf("a message after burned ids was not handed out in two polls; settled %d, before %d", b.settled(), before)
					}
					p.expire()
					fit("at the end of a round")
				}
			})
		})
	}
}

// freeze stops the process that writes the write-ahead log by itself. The function it returns reports whether nothing has
// reached the disk since.
func (b *bench) freeze() (lost func() bool) {
	pid := value[int](b.sessions[0], "select pid from pg_stat_activity where backend_type = 'walwriter'")
	process, err := os.FindProcess(pid)
	if err != nil {
		b.failf("walwriter: %w", err)
	}
	if err := process.Signal(syscall.SIGSTOP); err != nil {
		b.failf("walwriter: %w", err)
	}
	b.lab.t.Cleanup(func() { _ = process.Signal(syscall.SIGCONT) })
	flushed := func() string { return value[string](b.sessions[0], "select pg_current_wal_flush_lsn()::text") }
	at := flushed()
	return func() bool { return flushed() == at }
}

// TestSequence: a topic's sequence that is altered or set back is refused by name, with its repair; what sessions had
// cached of it is never drawn below the settled head.
func TestSequence(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	scenarios := map[string]func(b *bench, m mode){
		"Cached":         cachedValues,
		"CachedInTx":     cachedInTransaction,
		"Increment":      func(b *bench, m mode) { altered(b, m, "increment 5") },
		"Cycle":          func(b *bench, m mode) { altered(b, m, "cycle") },
		"Cache":          func(b *bench, m mode) { altered(b, m, "cache 2") },
		"Falling":        func(b *bench, m mode) { altered(b, m, "increment -1 minvalue -1000000 maxvalue 9223372036854775807") },
		"BackToSettled":  backToSettled,
		"BackUnderLog":   backUnderLog,
		"BackWhileAt":    backWhileAt,
		"SeenAtWork":     seenAtWork,
		"BackBeforeCopy": backBeforeCopy,
	}
	for name, scenario := range scenarios {
		for _, m := range modes {
			t.Run(name+"/"+m.String(), func(t *testing.T) {
				if err := l.play(func(b *bench) { scenario(b, m); b.invariants() }, nil); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// cachedValues: sessions that drew with CACHE 10 hold lower ids than others have given out since. ALTER SEQUENCE takes
// them away: it gives the sequence another file, which nextval() notices.
func cachedValues(b *bench, m mode) {
	one, two, raw, c := b.session("one"), b.session("two"), b.session("raw"), b.session("c")
	r := b.rise()
	one.produce()
	c.take(m)
	c.do("alter sequence weir.log_1_id cache 10")
	one.produce()                                           // and keeps nine
	raw.do("insert into weir.log_1 (payload) values ('1')") // the same
	two.produce()
	_, err := c.tryPoll(m, 100)
	hint := b.expect(err, "WE008", "poll of a sequence with CACHE 10")
	r.look()
	c.obey(hint)
	two.produce()
	for range 3 {
		c.take(m)
		r.look()
	}
	at := b.settled()
	one.produce()
	raw.do("insert into weir.log_1 (payload) values ('1')")
	if lowest := value[int64](c, "select min(id) from (select id from weir.log_1 order by produced_at desc limit 2) as last"); lowest <= at {
		b.failf("id %d was drawn from a cache, at or below the settled head %d", lowest, at)
	}
	b.drain(m)
	r.look()
}

// cachedInTransaction: ALTER SEQUENCE waits for a transaction that has drawn, so none is at work on both sides of it.
func cachedInTransaction(b *bench, m mode) {
	one, two, c, d := b.session("one"), b.session("two"), b.session("c"), b.session("d")
	c.do("alter sequence weir.log_1_id cache 10")
	one.do("begin")
	one.produce()
	two.produce()
	altering := d.begin("alter sequence weir.log_1_id increment 1 cache 1 no cycle")
	altering.mustBlock()
	one.produce() // from its cache, below the id of two
	if _, err := c.tryPoll(plain, 100); code(err) != "WE008" {
		b.failf("poll while the repair waits: got %v, want WE008", err)
	}
	one.do("commit")
	altering.end()
	r := b.rise()
	for range 3 {
		c.take(m)
		r.look()
	}
	one.produce()
	b.drain(m)
	r.look()
}

// altered: what is proven already can be had; then the alteration is named, to everyone who asks, until it is repaired.
func altered(b *bench, m mode, how string) {
	p, c := b.session("p"), b.session("c")
	for range 4 {
		p.produce()
	}
	c.poll(m, 0)
	if at := b.settled(); at != 4 {
		b.failf("settled is %d, not 4", at)
	}
	c.do("alter sequence weir.log_1_id " + how)
	for range 2 {
		_ = p.try("select weir.produce('t', '1')") // a falling sequence is refused here already
	}
	rows, err := c.tryPoll(m, 2)
	if err != nil || len(rows) != 1 {
		b.failf("what was proven before: %+v, %v", rows, err)
	}
	c.fetch(*rows[0].ID)
	c.do("select weir.ack($1, 'c')", *rows[0].ID)
	for _, text := range []string{"select weir.claim('t', 'g', 'c')", "select weir.poll('t', 'g', 'c', 100, '15 s', 1000000, null, true)"} {
		b.expect(c.try(text), "WE008", text)
	}
	b.mend(c)
	p.produce()
	b.drain(m)
}

// mend does what the hints of the refusals say, until there is none. What it claims meanwhile expires.
func (b *bench) mend(c *session) {
	for range 3 {
		_, err := c.tryPoll(plain, 100)
		if err == nil {
			c.expire()
			return
		}
		if code(err) != "WE007" {
			c.obey(b.expect(err, "WE008", "poll"))
		} else {
			c.obey(b.expect(err, "WE007", "poll"))
		}
	}
	b.failf("three repairs were not enough")
}

// backToSettled: the next id would be the settled head itself, which no message has.
func backToSettled(b *bench, m mode) {
	p, q, c := b.session("p"), b.session("q"), b.session("c")
	p.produce()
	q.do("begin")
	q.produce()
	p.produce()
	p.do("delete from weir.log_1 where id = 3") // as if it had never been
	p.produce()
	q.do("rollback")
	c.take(m)
	if at := b.settled(); at != 4 {
		b.failf("settled is %d, not 4", at)
	}
	p.do("delete from weir.log_1 where id = 4")
	delete(b.got, 4)
	for _, back := range []int{3, 2, 1} {
		p.do("select setval('weir.log_1_id', $1)", back)
		for _, text := range []string{
			"select weir.produce('t', '1')", "select weir.produce_many('t', '{1,2,3,4,5}')", "select weir.make_room('t', 1)",
		} {
			b.expect(q.try(text), "WE007", fmt.Sprintf("%s with the sequence at %d", text, back))
			p.do("select setval('weir.log_1_id', $1)", back)
		}
		_, err := c.tryPoll(m, 100)
		b.expect(err, "WE007", "poll")
	}
	_, err := c.tryPoll(m, 100)
	c.obey(b.expect(err, "WE007", "poll"))
	if id := p.produce(); id != 5 {
		b.failf("after the repair the next id is %d, not 5", id)
	}
	b.drain(m)
}

// backUnderLog: the sequence stands above the settled head and below messages. Ids are refused or drawn above both.
func backUnderLog(b *bench, m mode) {
	p, q, c := b.session("p"), b.session("q"), b.session("c")
	for range 3 {
		p.produce()
	}
	c.take(m)
	for range 5 {
		p.produce()
	}
	q.do("begin")
	q.produce()
	q.do("rollback")
	p.produce() // 10; 9 is a gap
	p.do("select setval('weir.log_1_id', 4)")
	r := b.rise()
	refused := 0
	for range 20 {
		if err := p.try("select weir.produce('t', '1')"); err != nil {
			refused++
			if code(err) == "WE007" {
				p.obey(b.expect(err, "WE007", "produce"))
			} else if code(err) != "23505" {
				b.failf("produce: %w", err)
			}
		}
		rows, err := c.tryPoll(m, 100)
		if code(err) == "WE007" {
			p.obey(b.expect(err, "WE007", "poll"))
			continue
		}
		if err != nil {
			b.failf("poll: %w", err)
		}
		for _, l := range rows {
			if l.ID != nil {
				c.fetch(*l.ID)
				c.do("select weir.ack($1, 'c')", *l.ID)
			}
		}
		r.look()
	}
	if refused == 0 {
		b.failf("nothing was refused")
	}
	b.drain(m)
	r.look()
}

// backWhileAt: the sequence is set back while a producer is between its checks; the id it draws is refused.
func backWhileAt(b *bench, m mode) {
	p, l, c := b.session("p"), b.session("l"), b.session("c")
	for range 5 {
		p.produce()
	}
	c.take(m)
	l.do("delete from weir.log_1 where id > 2")
	clear(b.got)
	b.got[1], b.got[2] = 1, 1
	// The insert waits for the log; its id is drawn after that.
	l.do("begin")
	l.do("lock table weir.log_1 in access exclusive mode")
	producing := p.begin("select weir.produce('t', '1')")
	producing.mustBlock()
	l.do("select setval('weir.log_1_id', 2)")
	l.do("commit")
	<-producing.done
	b.expect(producing.err, "WE007", "produce while the sequence is set back")
	_, err := c.tryPoll(m, 100)
	c.obey(b.expect(err, "WE007", "poll"))
	p.produce()
	b.drain(m)
}

// seenAtWork: a producer that draws many ids, some of them below a head that waits for it, is not taken for one whose
// sequence was set back.
func seenAtWork(b *bench, m mode) {
	p, l, c := b.session("p"), b.session("l"), b.session("c")
	l.do("create function public.slow() returns trigger language plpgsql as 'begin perform pg_advisory_xact_lock_shared(42); return new; end'")
	l.do("create trigger slow before insert on weir.log_1 for each row when (new.key = 'slow') execute function public.slow()")
	l.do("select pg_advisory_lock(42)")
	p.do("begin")
	producing := p.begin("select weir.produce_many('t', '{1,2,3}', '{a,slow,b}')")
	producing.mustBlock()
	b.session("q").produce()
	b.looked(c, m)
	l.do("select pg_advisory_unlock(42)")
	producing.end()
	p.produce()
	c.take(m)
	p.do("commit")
	b.drain(m)
}

// backBeforeCopy: the client's COPY asks for room first, and is refused there.
func backBeforeCopy(b *bench, m mode) {
	ctx := context.Background()
	client, err := weir.Open(ctx, b.lab.server.DSN(b.database), &weir.Options{NoListen: true})
	if err != nil {
		b.failf("open: %w", err)
	}
	defer client.Close()
	p, c := b.session("p"), b.session("c")
	for range 20 {
		p.produce()
	}
	c.take(m)
	p.do("delete from weir.log_1 where id > 2")
	clear(b.got)
	b.got[1], b.got[2] = 1, 1
	p.do("select setval('weir.log_1_id', 2)")
	messages := func(yield func(weir.Message, error) bool) {
		for range 30 {
			if !yield(weir.Message{Payload: 1}, nil) {
				return
			}
		}
	}
	if n, err := client.Copy(ctx, "t", messages); !errors.Is(err, weir.ErrSequence) {
		b.failf("a copy below the settled head stored %d messages: %w", n, err)
	}
	if _, err := client.Produce(ctx, "t", weir.Message{Payload: 1}); !errors.Is(err, weir.ErrSequence) {
		b.failf("a produce below the settled head: %w", err)
	}
	_, err = c.tryPoll(m, 100)
	c.obey(b.expect(err, "WE007", "poll"))
	if _, err := client.Copy(ctx, "t", messages); err != nil {
		b.failf("copy: %w", err)
	}
	b.drain(m)
}

var levels = []string{"read committed", "repeatable read", "serializable"}

// again reports whether the server asks for the transaction to be repeated.
func again(err error) bool { return code(err) == "40001" || code(err) == "40P01" }

// TestCallerTransaction: claim, fetch and ack inside a transaction of the caller's, at every level, whatever it did before,
// with producers at work: what it commits was handed out once, and what it rolls back is handed out again. Transactions of
// that kind alone bring the group to the end of the log.
func TestCallerTransaction(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, level := range levels {
		for i, before := range []string{"nothing", "a write", "a produce", "a savepoint"} {
			if i > 1 && level == "serializable" { // which reads as repeatable read does
				continue
			}
			t.Run(level+"/"+before, func(t *testing.T) {
				if err := l.play(func(b *bench) {
					b.watch.Exec(context.Background(), "create table public.other (n int)")
					for _, how := range []string{"statements", "one statement", "own"} {
						callerTransaction(b, level, before, how)
					}
					b.invariants()
				}, nil); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func callerTransaction(b *bench, level, before, how string) {
	name := fmt.Sprintf("%s, %s before, %s", level, before, how)
	p, q, c := b.session("p"), b.session("q"), b.session("c")
	r := b.rise()
	// transaction is one attempt; between runs after the claim, and end ends it.
	transaction := func(end string, between func()) (ids []int64, err error) {
		defer func() {
			if err != nil {
				_ = c.try("rollback")
			}
		}()
		list := func(text string, args ...any) (list []int64, err error) {
			rows, err := c.conn.Query(context.Background(), text, args...)
			if err != nil {
				return nil, err
			}
			return pgx.CollectRows(rows, pgx.RowTo[int64])
		}
		if err := c.try("begin isolation level " + level); err != nil {
			return nil, err
		}
		switch before {
		case "a write":
			err = c.try("insert into public.other values (1)")
		case "a produce":
			err = c.try("select weir.produce('t', '1')")
		case "a savepoint":
			for _, text := range []string{"savepoint s", "insert into public.other values (1)", "select weir.claim('t', 'g', 'c')", "rollback to s"} {
				if err == nil {
					err = c.try(text)
				}
			}
		}
		if err != nil {
			return nil, err
		}
		switch how {
		case "one statement":
			ids, err = list("select f.id from weir.claim('t', 'g', 'c') as k, lateral weir.fetch(k.lease_id) as f")
			between()
			if err == nil {
				err = c.try("select weir.ack(lease_id, 'c') from weir.leases where consumer = 'c'")
			}
		default:
			text := "select lease_id from weir.claim('t', 'g', 'c')"
			if how == "own" {
				text = "select lease_id from weir.poll('t', 'g', 'c', 100, '15 s', 1000000, null, true) where lease_id is not null"
			}
			var leases []int64
			leases, err = list(text)
			between()
			for _, lease := range leases {
				if err == nil {
					var more []int64
					more, err = list("select id from weir.fetch($1)", lease)
					ids = append(ids, more...)
				}
				if err == nil && !value[bool](c, "select weir.ack($1, 'c')", lease) {
					b.failf("%s: lease %d was lost", name, lease)
				}
			}
		}
		if err == nil {
			err = c.try(end)
		}
		return ids, err
	}
	// until repeats it as a caller would, until it gives something, or want messages.
	until := func(what string, end string, between func(), enough func() bool) {
		began := time.Now()
		for !enough() {
			ids, err := transaction(end, between)
			between = func() {}
			if err != nil && !again(err) {
				b.failf("%s: %w", name, err)
			}
			if err == nil && end == "commit" {
				for _, id := range ids {
					b.got[id]++
				}
			}
			r.look()
			if waited := time.Since(began); waited > slow {
				b.failf("stalled: %s: %s for %v, settled head %d", name, what, waited, b.settled())
			}
		}
	}
	p.do("begin")
	open := p.produce()
	first := q.produce()
	tries := 0
	until("rolling back", "rollback", func() {}, func() bool { tries++; return tries > 3 })
	if at := b.settled(); at >= open {
		b.failf("%s: settled is %d, and %d is open", name, at, open)
	}
	until("waiting for a producer", "commit", func() { p.do("commit"); q.produce() }, func() bool { return b.got[open] > 0 && b.got[first] > 0 })

	// The producer commits between the head that a claim reads and the rows that it reads.
	p.do("begin")
	open = p.produce()
	p.do("savepoint s")
	p.produce()
	p.do("rollback to s")
	last := q.produce()
	until("rolling back", "rollback", func() { p.do("commit") }, func() bool { tries++; return tries > 6 })
	until("rolled back", "commit", func() { q.do("select pg_current_xact_id()") }, func() bool { return b.got[open] > 0 && b.got[last] > 0 })
	p.close()
	q.close()
	if before == "a produce" { // its last message waits for another claim
		b.drain(plain)
	}
	c.close()
	b.complete()
}

// TestDefaultIsolation: a database whose transactions are REPEATABLE READ or SERIALIZABLE by default. Producers and consumers
// in plain SQL repeat what the server asks to repeat; the library's need not.
func TestDefaultIsolation(t *testing.T) {
	t.Parallel()
	// Nothing here pauses, so that SERIALIZABLE has more to remember than it has memory for by default.
	server := pgtest.New(t, &pgtest.Options{Fast: true, Settings: map[string]string{"max_pred_locks_per_transaction": "1024"}})
	for i, level := range levels[1:] {
		for _, m := range modes {
			t.Run(level+"/"+m.String(), func(t *testing.T) {
				database := fmt.Sprintf("isolation_%d_%v", i, m)
				install(t, server, database)
				isolate(t, server, database, level)
				on(t, server, database, func(b *bench) { concurrently(b, m) })
			})
		}
		t.Run(level+"/library", func(t *testing.T) {
			database := fmt.Sprintf("isolation_%d", i)
			migrate(t, server, database)
			isolate(t, server, database, level)
			library(t, server, database)
		})
		t.Run(level+"/segments", func(t *testing.T) {
			database := fmt.Sprintf("isolation_%d_segments", i)
			install(t, server, database)
			isolate(t, server, database, level)
			on(t, server, database, longSnapshot)
		})
	}
}

// concurrently has three producers and three consumers at work at once.
func concurrently(b *bench, m mode) {
	const producers, consumers, each = 3, 3, 60
	var (
		work     sync.WaitGroup
		mu       sync.Mutex
		repeated atomic.Int64
		left     atomic.Int64
	)
	left.Store(producers)
	errs := make(chan error, producers+consumers)
	// persist repeats a transaction as the server asks for.
	persist := func(s *session, f func() error) error {
		for began := time.Now(); ; {
			err := f()
			if err == nil || !again(err) || time.Since(began) > patience {
				return err
			}
			repeated.Add(1)
			_ = s.try("rollback")
		}
	}
	for i := range producers {
		s := b.session(fmt.Sprintf("p%d", i))
		work.Go(func() {
			defer left.Add(-1)
			for n := range each {
				end := "commit"
				if n%10 == 9 {
					end = "rollback"
				}
				err := persist(s, func() error {
					for _, text := range []string{"begin", "select weir.produce('t', '1')", "select weir.produce_many('t', '{2,3}')", end} {
						if err := s.try(text); err != nil {
							return err
						}
					}
					return nil
				})
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	drained := func(s *session) (bool, error) {
		var done bool
		err := persist(s, func() error {
			return s.conn.QueryRow(context.Background(), "select claimed >= coalesce((select max(id) from weir.log_1), 0) from weir.cursor").Scan(&done)
		})
		return done && left.Load() == 0, err
	}
	for i := range consumers {
		s := b.session(fmt.Sprintf("c%d", i))
		work.Go(func() {
			for {
				var rows []leased
				err := persist(s, func() (err error) { rows, err = s.tryPoll(m, 20); return err })
				for _, l := range rows {
					if l.ID == nil || err != nil {
						continue
					}
					var ids []int64
					err = persist(s, func() error {
						r, err := s.conn.Query(context.Background(), "select id from weir.fetch($1)", *l.ID)
						if err != nil {
							return err
						}
						ids, err = pgx.CollectRows(r, pgx.RowTo[int64])
						return err
					})
					mu.Lock()
					for _, id := range ids {
						b.got[id]++
					}
					mu.Unlock()
					if err == nil {
						err = persist(s, func() error { return s.try("select weir.ack($1, $2)", *l.ID, s.name) })
					}
				}
				var done bool
				if err == nil && len(rows) == 0 {
					done, err = drained(s)
				}
				if err != nil {
					errs <- err
					return
				}
				if done {
					return
				}
			}
		})
	}
	r := b.rise()
	over := make(chan struct{})
	go func() { work.Wait(); close(over) }()
	for going := true; going; {
		select {
		case <-over:
			going = false
		case err := <-errs:
			b.failf("%w", err)
		default:
			r.look()
		}
	}
	select {
	case err := <-errs:
		b.failf("%w", err)
	default:
	}
	b.lab.t.Logf("%d transactions were repeated", repeated.Load())
	b.drain(m)
}

// longSnapshot: a producer and a consumer whose snapshot is older than the log's latest segments.
func longSnapshot(b *bench) {
	p, q, c := b.session("p"), b.session("q"), b.session("c")
	for _, s := range []*session{p, c} {
		s.do("begin")
		s.do("select count(*) from weir.segment")
	}
	for range 5 {
		q.do("select weir.produce_many('t', array_fill('1'::json, array[700]))")
	}
	end := func(s *session, texts ...string) {
		for _, text := range append(texts, "commit") {
			if err := s.try(text); again(err) { // which SERIALIZABLE may say to any of them
				s.do("rollback")
				return
			} else if err != nil {
				b.failf("%s: %s: %w", s.name, text, err)
			}
		}
	}
	end(p, "select weir.produce('t', '1')", "select weir.produce_many('t', array_fill('1'::json, array[700]))", "select weir.produce('t', '1')")
	end(c, "select weir.claim('t', 'g', 'c', 1)")
	c.expire()
	b.drain(own)
}

// library has clients of the library produce and consume, and demands that each message is handled once.
func library(t *testing.T, server *pgtest.Server, database string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client, err := weir.Open(ctx, server.DSN(database), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.CreateTopic(ctx, "t", &weir.TopicOptions{SegmentSize: 1000}); err != nil {
		t.Fatal(err)
	}
	if err := client.CreateGroup(ctx, "t", "g", &weir.GroupOptions{RetryDelay: -1}); err != nil {
		t.Fatal(err)
	}
	const producers, each = 4, 50
	var mu sync.Mutex
	handled := map[int]int{}
	all := make(chan struct{})
	handler := weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		mu.Lock()
		defer mu.Unlock()
		if m.Value%20 == 0 && m.Attempt == 1 {
			return errors.New("not yet")
		}
		handled[m.Value]++
		if len(handled) == producers*each {
			close(all)
		}
		return nil
	})
	running, stop := context.WithCancel(ctx)
	defer stop()
	var work sync.WaitGroup
	for range 2 {
		consumer, err := client.NewConsumer("t", "g", handler, &weir.ConsumerOptions{Concurrency: 4})
		if err != nil {
			t.Fatal(err)
		}
		work.Go(func() {
			if err := consumer.Run(running); err != nil {
				t.Error(err)
			}
		})
	}
	var producing sync.WaitGroup
	for i := range producers {
		producing.Go(func() {
			for n := range each {
				if _, err := client.Produce(ctx, "t", weir.Message{Payload: i*each + n}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	producing.Wait()
	select {
	case <-all:
	case <-ctx.Done():
		t.Errorf("%d of %d messages were handled", len(handled), producers*each)
	}
	stop()
	work.Wait()
	for v, n := range handled {
		if n != 1 {
			t.Errorf("message %d was handled %d times", v, n)
		}
	}
	on(t, server, database, func(b *bench) {
		b.until("all is acknowledged", func() bool {
			return value[bool](b.sessions[0], "select committed = head and retrying = 0 and dead = 0 from weir.groups")
		})
	})
}

// TestStandby: a standby hands nothing out and says where to go; it can be read up to the settled head, by a reader that
// keeps its own position, while the primary is at work; promoted, it goes on.
func TestStandby(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	primary := pgtest.New(t, &pgtest.Options{Fast: true})
	install(t, primary, "log")
	folder := filepath.Join(filepath.Dir(primary.DataDir()), "standby")
	pipe(t, primary, nil, "pg_basebackup", "-D", folder, "-R", "--checkpoint=fast", "--no-sync")
	standby := pgtest.New(t, &pgtest.Options{Fast: true, DataDir: folder})

	var got map[int64]int
	var prepared, before int64
	on(t, primary, "log", func(b *bench) {
		p, q, c := b.session("p"), b.session("q"), b.session("c")
		arrived := func(s *bench) {
			q.do("select pg_current_xact_id()") // what nobody waited for reaches the disk with it
			at := value[string](q, "select pg_current_wal_lsn()::text")
			s.until("the standby has what the primary has", func() bool {
				return value[bool](s.sessions[0], "select pg_last_wal_replay_lsn() >= $1::text::pg_lsn", at)
			})
		}
		for range 5 {
			p.produce()
		}
		c.take(own)
		p.do("begin")
		open := p.produce()
		q.produce()
		c.poll(own, 0)
		on(t, standby, "log", func(s *bench) {
			arrived(s)
			reader := s.session("reader")
			read := func(after int64) []int64 {
				return value[[]int64](reader, "select coalesce(array_agg(id), '{}') from weir.read('t', $1, 1000)", after)
			}
			for _, text := range []string{
				"select * from weir.claim('t', 'g', 'c')",
				"select * from weir.poll('t', 'g', 'c', 100, '15 s', 1000000, null, true)",
				"select * from weir.poll('t', 'g', 'c', 100, '15 s', 1000000, '{1}', false)",
				"select weir.produce('t', '1')", "select weir.produce_many('t', '{1}')",
				"select weir.seek('t', 'g', '\"head\"')", "select weir.redrive('t', 'g')", "select weir.purge('t', 'g')",
				"select weir.create_topic('u')", "select weir.create_group('t', 'h')", "select weir.drop_group('t', 'g')", "select weir.drop_topic('t')",
			} {
				hint := s.expect(reader.try(text), "WE006", text)
				if !strings.Contains(hint, "primary") {
					s.failf("the hint does not name the primary: %s", hint)
				}
			}
			client, err := weir.Open(ctx, standby.DSN("log"), nil)
			if err != nil {
				s.failf("open: %w", err)
			}
			defer client.Close()
			if _, err := client.Produce(ctx, "t", weir.Message{Payload: 1}); !errors.Is(err, weir.ErrStandby) {
				s.failf("produce by the library: %w", err)
			}
			if n, err := client.Copy(ctx, "t", func(yield func(weir.Message, error) bool) { yield(weir.Message{Payload: 1}, nil) }); !errors.Is(err, weir.ErrStandby) {
				s.failf("copy of %d by the library: %w", n, err)
			}
			if list, err := client.Read(ctx, "t", 0, 10); err != nil || len(list) != 5 {
				s.failf("the library read %d messages, not 5: %w", len(list), err)
			}

			r := s.rise()
			r.look()
			if ids := read(0); !slices.Equal(ids, []int64{1, 2, 3, 4, 5}) {
				s.failf("read %v, and %d is open", ids, open)
			}
			b.looked(c, own)
			arrived(s)
			if ids := read(5); len(ids) > 0 {
				s.failf("read %v, and %d is open", ids, open)
			}
			r.look()
			p.do("commit")
			q.produce()
			c.take(own) // the pair is proven by what arrives

			// Many producers, and a reader that never looks back.
			var work sync.WaitGroup
			var left atomic.Int64
			for i := range 4 {
				w := b.session(fmt.Sprintf("w%d", i))
				left.Add(1)
				work.Go(func() {
					defer left.Add(-1)
					for n := range 40 {
						_ = w.try("begin")
						_ = w.try("select weir.produce('t', '1')")
						_ = w.try("select weir.produce('t', '1') from pg_sleep($1)", rand.Float64()/100)
						_ = w.try([]string{"commit", "commit", "rollback"}[n%3])
					}
				})
			}
			var list []int64
			last := int64(0)
			follow := func() {
				for _, id := range read(last) {
					list, last = append(list, id), id
				}
				r.look()
			}
			for left.Load() > 0 {
				c.take(own)
				follow()
			}
			work.Wait()
			s.until("the reader has all", func() bool {
				c.take(own)
				follow()
				return last == value[int64](b.sessions[0], "select max(id) from weir.log_1")
			})
			if all := value[[]int64](b.sessions[0], "select array_agg(id order by id) from weir.log_1"); !slices.Equal(all, list) {
				s.failf("skipped: the reader has %d messages, the log %d", len(list), len(all))
			}
		})

		// What the standby is to be promoted with: a prepared producer, an open one, a pair that waits for them.
		b.drain(own)
		p.do("begin")
		prepared = p.produce()
		p.do("prepare transaction 'one'")
		o := b.session("o")
		o.do("begin")
		o.produce()
		q.produce()
		b.looked(c, own)
		before = b.settled()
		on(t, standby, "log", arrived)
		got = maps.Clone(b.got)
	})
	if err := primary.Crash(ctx); err != nil {
		t.Fatal(err)
	}
	on(t, standby, "log", func(b *bench) {
		b.got = got
		r := b.rise()
		r.look()
		if r.settled > before {
			b.failf("the standby's settled head is %d, that of the primary was %d", r.settled, before)
		}
		c, q := b.session("c"), b.session("q")
		if !value[bool](c, "select pg_promote()") {
			b.failf("not promoted")
		}
		for range 3 {
			c.take(own)
			r.look()
		}
		q.produce()
		b.looked(c, own)
		r.look()
		if at := b.settled(); at >= prepared {
			b.failf("settled is %d, and %d is prepared", at, prepared)
		}
		q.do("commit prepared 'one'")
		b.drain(own)
		b.drain(plain)
		r.look()
	})
}

// TestSynchronousStandby: a commit that waits for a standby which never answers is durable, invisible, and in flight.
// Consumers do not wait for it.
func TestSynchronousStandby(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	server := pgtest.New(t, &pgtest.Options{Fast: true})
	reload := func(text string) {
		t.Helper()
		for _, text := range []string{text, "select pg_reload_conf()"} {
			if err := server.Exec(ctx, "postgres", text); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i, end := range []string{"cancelled", "terminated", "reset", "crashed"} {
		for _, m := range modes[i%2:] {
			t.Run(end+"/"+m.String(), func(t *testing.T) {
				database := "synchronous_" + end + "_" + m.String()
				install(t, server, database)
				defer reload("alter system reset synchronous_standby_names")
				on(t, server, database, func(b *bench) {
					p, q, c := b.session("p"), b.session("q"), b.session("c")
					for _, s := range []*session{b.sessions[0], q} {
						s.do("set synchronous_commit = local")
					}
					if m == plain { // as the caller says: nothing here is to wait
						c.do("set synchronous_commit = off")
					}
					reload("alter system set synchronous_standby_names = 'nobody'")
					b.until("the setting has arrived", func() bool {
						return value[string](p, "show synchronous_standby_names") == "nobody" &&
							value[string](c, "show synchronous_standby_names") == "nobody"
					})
					p.do("begin")
					waits := p.produce()
					committing := p.begin("commit")
					b.until("the commit waits for the standby", func() bool {
						return value[bool](b.sessions[0], "select coalesce(bool_or(wait_event = 'SyncRep'), false) from pg_stat_activity where pid = $1", int64(p.pid))
					})
					q.produce()
					var held []int64
					r := b.rise()
					turn := func() { // acknowledges with the poll: a plain ack is the caller's own commit
						rows := c.poll(m, 100, held...)
						held = nil
						for _, l := range rows {
							if l.ID != nil && l.State != "lost" {
								c.fetch(*l.ID)
								held = append(held, *l.ID)
							}
						}
						r.look()
					}
					turn()
					b.looked(c, m)
					for range 3 {
						turn()
					}
					if at := b.settled(); at >= waits {
						b.failf("settled is %d, and %d waits for the standby", at, waits)
					}
					switch end {
					case "cancelled":
						if err := p.conn.PgConn().CancelRequest(ctx); err != nil {
							b.failf("cancel: %w", err)
						}
						committing.end()
					case "terminated":
						q.do("select pg_terminate_backend($1, 5000)", int64(p.pid))
						<-committing.done
					case "reset":
						reload("alter system reset synchronous_standby_names")
						committing.end()
					case "crashed":
						if err := server.Crash(ctx); err != nil {
							t.Fatal(err)
						}
						if err := server.StartAgain(ctx); err != nil {
							t.Fatal(err)
						}
						b.reconnect()
						c = b.session("c")
						if m == plain {
							c.do("set synchronous_commit = off")
						}
						b.sessions[0].do("set synchronous_commit = local")
						r = b.rise()
					}
					b.until("all is handed out", func() bool { turn(); return b.got[waits] > 0 && b.got[waits+1] > 0 })
					turn()
					b.complete()
					if !value[bool](b.sessions[0], "select committed = head from weir.groups") {
						b.failf("something is not acknowledged")
					}
				})
			})
		}
	}
	t.Run("library", func(t *testing.T) {
		install(t, server, "synchronous")
		client, err := weir.Open(ctx, server.DSN("synchronous"), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		defer reload("alter system reset synchronous_standby_names")
		reload("alter system set synchronous_standby_names = 'nobody'")
		on(t, server, "synchronous", func(b *bench) {
			p := b.session("p")
			p.do("set synchronous_commit = local")
			const messages = 50
			var handled atomic.Int64
			consumer, err := client.NewConsumer("t", "g", weir.Handle(func(context.Context, *weir.Received[int]) error {
				handled.Add(1)
				return nil
			}), &weir.ConsumerOptions{Concurrency: 2, Lease: time.Second}) // renewed while it waits
			if err != nil {
				b.failf("%w", err)
			}
			running, stop := context.WithCancel(ctx)
			ended := make(chan error, 1)
			go func() { ended <- consumer.Run(running) }()
			defer func() {
				stop()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}()
			for range messages {
				p.produce()
			}
			b.until("all is acknowledged", func() bool {
				return value[bool](b.sessions[0], "select claimed = $1 and committed = $1 and leases = 0 from weir.groups", messages)
			})
			if n := handled.Load(); n != messages {
				b.failf("%d messages were handled, not %d", n, messages)
			}
			if s := consumer.Stats(); s.Lost > 0 {
				b.failf("%d leases were lost", s.Lost)
			}
		})
	})
}

// TestLogicalReplica: tables that were replicated without their sequences are refused by producers and consumers until the
// statement in the hint has been run; then everything goes on, whatever the xids of the replica are.
func TestLogicalReplica(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	source := pgtest.New(t, &pgtest.Options{Fast: true, Settings: map[string]string{"wal_level": "logical"}})
	// What it has failed at is tried again soon.
	replica := pgtest.New(t, &pgtest.Options{Fast: true, Settings: map[string]string{"wal_retrieve_retry_interval": "100ms"}})
	burn(t, source, 5_000)
	const tables = "weir.topic, weir.segment, weir.fence, weir.consumer_group, weir.cursor, weir.lease, weir.delivery"
	for i, xids := range []string{"lower", "higher"} {
		for _, m := range modes {
			t.Run(xids+"/"+m.String(), func(t *testing.T) {
				if i == 1 && m == own {
					burn(t, replica, 15_000)
				}
				database := "replicated_" + xids + "_" + m.String()
				install(t, source, database)
				migrate(t, replica, database)
				var got map[int64]int
				on(t, source, database, func(b *bench) {
					p, q, c := b.session("p"), b.session("q"), b.session("c")
					p.do("select weir.create_topic('fresh', '{\"segment_size\": 1000}')")
					p.do("select weir.create_group('fresh', 'g')")
					for range 10 {
						p.produce()
						p.do("select weir.produce('fresh', '1')") // whose group has not been there yet
					}
					first := *c.poll(m, 4)[0].ID
					c.do("select weir.fail($1, 'c', 2, 'cannot be', outcome => 'dead')", first)
					c.do("select weir.ack($1, 'c')", first)
					b.got[1], b.got[2], b.got[3], b.got[4] = 1, 1, 1, 1
					c.poll(m, 3) // held
					got = maps.Clone(b.got)

					on(t, replica, database, func(r *bench) {
						s := r.session("s")
						s.do("select weir.create_topic('t', '{\"segment_size\": 1000}')")
						s.do("select weir.create_topic('fresh', '{\"segment_size\": 1000}')")
						s.do("truncate " + tables + " cascade")
						p.do("create publication weir for table " + tables + ", weir.log_1, weir.log_2 with (publish_via_partition_root = true)")
						s.do(fmt.Sprintf("create subscription %s connection '%s' publication weir", database, source.DSN(database)))
						r.until("the tables are there", func() bool {
							return value[bool](s, "select count(*) = 9 and bool_and(srsubstate = 'r') from pg_subscription_rel as r join pg_subscription as s on s.oid = r.srsubid where s.subname = $1", database)
						})
						p.do("begin")
						p.produce()
						q.produce()
						c.poll(m, 100) // all up to the open one is held
						b.looked(c, m)
						all := "select format('%s %s %s %s', (select count(*) from weir.log_1), (select string_agg(f::text, ' ' order by f.slot) from weir.fence as f where topic_id = 1), (select string_agg(l::text, ' ' order by l.id) from weir.lease as l), (select string_agg(claimed::text, ' ' order by group_id) from weir.cursor))"
						r.until("all has arrived", func() bool {
							return value[string](s, all) == value[string](b.sessions[0], all)
						})
						// The source is gone, with its open producer.
						s.do("alter subscription " + database + " disable")
						s.do("alter subscription " + database + " set (slot_name = none)")
						s.do("drop subscription " + database)

						r.got = maps.Clone(got)
						refuses(r, s, "t")
						_, err := s.tryPoll(m, 100)
						s.obey(r.expect(err, "WE007", "poll"))
						refuses(r, s, "fresh")
						s.obey(r.expect(s.try("select weir.produce('fresh', '1')"), "WE007", "produce"))
						w := r.rise()
						w.look()
						if id := s.produce(); id <= 12 && id != 13 {
							r.failf("id %d was issued again", id)
						}
						s.do("select weir.create_group('t', 'late')")
						s.do("select weir.create_topic('third')")
						r.expire()
						r.drain(m)
						w.look()
						s.do("select weir.produce('fresh', '1')")
						r.until("the other topic's messages are handed out", func() bool {
							return value[int](s, "select count(*)::int from weir.claim('fresh', 'g', 'c') as k, lateral weir.fetch(k.lease_id)") == 11
						})
						if value[int64](s, "select message_id from weir.dead_letters") != 2 {
							r.failf("the dead letter was lost")
						}
					})
					// So that the database can be dropped, and the source's own invariants be looked at.
					p.do("rollback")
					q.do("drop publication weir")
				})
				if err := source.Exec(ctx, "postgres", "select pg_drop_replication_slot('"+database+"')"); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// refuses demands that producers and consumers are refused, loudly, and that nothing was stored.
func refuses(b *bench, s *session, topic string) {
	count := value[int](s, "select (select count(*) from weir.log_1)::int + (select count(*) from weir.log_2)::int")
	for _, text := range []string{
		"select weir.produce('%s', '1')", "select weir.produce_many('%s', '{1,2,3}')",
		"select weir.claim('%s', 'g', 'c')", "select weir.poll('%s', 'g', 'c', 100, '15 s', 1000000, null, true)",
	} {
		b.expect(s.try(fmt.Sprintf(text, topic)), "WE007", fmt.Sprintf(text, topic))
	}
	if n := value[int](s, "select (select count(*) from weir.log_1)::int + (select count(*) from weir.log_2)::int"); n != count {
		b.failf("%d messages were stored below what is there", n-count)
	}
}

// TestWriters: writers that hold their transactions for as long as they like, and groups that want everything: each gets
// the same set. It prints how long a committed message waited, against the longest transaction.
func TestWriters(t *testing.T) {
	writers, messages, hold, batch := 32, 20_000, 200*time.Millisecond, 60
	if os.Getenv("WEIR_LONG") != "" {
		messages, hold, batch = 100_000, 2*time.Second, 200
	}
	l := newLab(t)
	err := l.play(func(b *bench) {
		ctx := context.Background()
		s := b.session("setup")
		s.do("select weir.create_group('t', 'h')")
		s.do("select weir.create_group('t', 'i')")
		// Segments are made inside transactions that may take long: leave room for what is drawn meanwhile.
		s.do("update weir.topic set segment_size = 20000")
		s.do("select weir.make_room('t', 40000)")
		var (
			mu        sync.Mutex
			committed = map[int64]time.Time{} // when its commit returned
			longest   time.Duration
			work      sync.WaitGroup
			left      atomic.Int64
		)
		errs := make(chan error, writers+6)
		for i := range writers {
			w := b.session(fmt.Sprintf("w%d", i))
			left.Add(1)
			work.Go(func() {
				defer left.Add(-1)
				for todo := messages / writers; todo > 0; {
					n := min(1+rand.IntN(batch), todo)
					kept := rand.IntN(20) > 0
					began := time.Now()
					err := func() error {
						if err := w.try("begin"); err != nil {
							return err
						}
						var ids []int64
						for part := range 2 { // some before the wait, some after it
							count := n / 2
							if part == 1 {
								count = n - n/2
							}
							rows, err := w.conn.Query(ctx, "select weir.produce_many('t', array_fill('1'::json, array[$1::int]))", count)
							if err != nil {
								return err
							}
							some, err := pgx.CollectRows(rows, pgx.RowTo[int64])
							if err != nil {
								return err
							}
							ids = append(ids, some...)
							if part == 0 {
								if err := w.try("select pg_sleep($1)", rand.Float64()*hold.Seconds()); err != nil {
									return err
								}
							}
						}
						if !kept {
							return w.try("rollback")
						}
						if err := w.try("commit"); err != nil {
							return err
						}
						now := time.Now()
						mu.Lock()
						defer mu.Unlock()
						for _, id := range ids {
							committed[id] = now
						}
						longest = max(longest, now.Sub(began))
						todo -= n
						return nil
					}()
					if err != nil {
						errs <- fmt.Errorf("%s: %w", w.name, err)
						return
					}
				}
			})
		}
		got := map[string]map[int64]int{}
		seen := map[string]map[int64]time.Time{}
		for _, group := range []string{"g", "h", "i"} {
			got[group], seen[group] = map[int64]int{}, map[int64]time.Time{}
			for k, m := range modes {
				c := b.session(fmt.Sprintf("%s%d", group, k))
				work.Go(func() {
					var held []int64
					for idle := 0; idle < 3; {
						over := left.Load() == 0
						rows, err := c.conn.Query(ctx, "select lease_id from weir.poll('t', $1, $2, 1000, '1 hour', 10000000, $3, $4) where lease_id is not null and state <> 'lost'", group, c.name, held, bool(m))
						if err == nil {
							held, err = pgx.CollectRows(rows, pgx.RowTo[int64])
						}
						for _, lease := range held {
							if err != nil {
								break
							}
							var ids []int64
							ids, err = pgx.CollectRows(must(c.conn.Query(ctx, "select id from weir.fetch($1)", lease)), pgx.RowTo[int64])
							now := time.Now()
							mu.Lock()
							for _, id := range ids {
								got[group][id]++
								seen[group][id] = now
							}
							mu.Unlock()
						}
						if err != nil {
							errs <- fmt.Errorf("%s: %w", c.name, err)
							return
						}
						if len(held) > 0 {
							continue
						}
						time.Sleep(2 * time.Millisecond) // two cores are to be left to the writers
						var all bool
						if over {
							if err := c.conn.QueryRow(ctx, "select claimed >= head from weir.groups where grp = $1", group).Scan(&all); err != nil {
								errs <- err
								return
							}
						}
						if all {
							idle++
						}
					}
				})
			}
		}
		r := b.rise()
		over := make(chan struct{})
		go func() { work.Wait(); close(over) }()
		for going := true; going; {
			select {
			case <-over:
				going = false
			case err := <-errs:
				b.failf("%w", err)
			case <-time.After(20 * time.Millisecond):
				r.look()
			}
		}
		select {
		case err := <-errs:
			b.failf("%w", err)
		default:
		}
		if n := value[int](b.sessions[0], "select count(*)::int from weir.log_1"); n != len(committed) || n != messages/writers*writers {
			b.failf("%d messages are in the log, %d were committed, not %d", n, len(committed), messages)
		}
		for group, ids := range got {
			var most, sum time.Duration
			for id, at := range committed {
				if ids[id] != 1 {
					b.failf("group %s got message %d %d times", group, id, ids[id])
				}
				delay := max(seen[group][id].Sub(at), 0)
				most, sum = max(most, delay), sum+delay
			}
			if len(ids) != len(committed) {
				b.failf("group %s got %d messages, %d were committed", group, len(ids), len(committed))
			}
			fmt.Printf("group %s: %d messages of %d writers, each once; delay at most %v (%.1f times the longest transaction, %v), %v on average\n",
				group, len(ids), writers, most.Round(time.Millisecond), float64(most)/float64(longest), longest.Round(time.Millisecond), (sum / time.Duration(len(committed))).Round(time.Millisecond))
			if most > 2*longest+10*time.Second {
				b.failf("group %s waited for %v, the longest transaction was %v", group, most, longest)
			}
		}
		b.invariants()
	}, nil)
	if err != nil {
		t.Error(err)
	}
}

// must is for rows whose error their reader reports again.
func must(rows pgx.Rows, _ error) pgx.Rows { return rows }
