package sql_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/sql/testdata"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }

// patience bounds every wait for a condition. It decides nothing but how long a failure takes.
const patience = 20 * time.Second

// lab is a server of its own, on which interleavings are driven step by step. The fence is about all transactions of a
// server, so nothing else may run there.
type lab struct {
	t      testing.TB
	server *pgtest.Server
	n      int
}

func newLab(t testing.TB) *lab {
	t.Helper()
	l := &lab{t: t, server: pgtest.New(t, &pgtest.Options{Fast: true})}
	ctx := context.Background()
	if err := l.server.CreateDatabase(ctx, "good"); err != nil {
		t.Fatal(err)
	}
	c, err := weir.Open(ctx, l.server.DSN("good"), &weir.Options{Migrate: true, NoListen: true})
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	return l
}

// bench is one database of a lab with one topic and one group, on which one scenario is played. Its steps end the scenario
// with an error when they fail, so that a scenario can be played against a broken schema as well.
type bench struct {
	lab      *lab
	database string
	watch    *pgx.Conn
	sessions []*session
	// got counts how often each message was handed out by a range or a retry.
	got map[int64]int
}

type failure struct{ err error }

// play runs a scenario on a fresh database, to which change is applied first, and returns what it found.
func (l *lab) play(scenario func(b *bench), change func(b *bench)) (err error) {
	l.n++
	ctx := context.Background()
	b := &bench{lab: l, database: fmt.Sprintf("bench_%d", l.n), got: map[int64]int{}}
	if err := l.server.Exec(ctx, "postgres", "create database "+b.database+" template good"); err != nil {
		l.t.Fatal(err)
	}
	defer func() {
		for _, s := range b.sessions {
			s.close()
		}
		if err := l.server.DropDatabase(ctx, b.database); err != nil {
			l.t.Error(err)
		}
	}()
	defer func() {
		if v := recover(); v != nil {
			f, ok := v.(failure)
			if !ok {
				panic(v)
			}
			err = f.err
		}
	}()
	b.watch = b.session("watch").conn
	if change != nil {
		change(b)
	}
	s := b.session("setup")
	s.do("select weir.create_topic('t', '{\"segment_size\": 1000}')")
	s.do("select weir.create_group('t', 'g', '{\"max_attempts\": 3, \"retry_delay\": \"0 s\"}')")
	scenario(b)
	return nil
}

func (b *bench) failf(format string, args ...any) { panic(failure{fmt.Errorf(format, args...)}) }

// session is one connection.
type session struct {
	b    *bench
	name string
	conn *pgx.Conn
	pid  uint32
	wait sync.WaitGroup // for what beginFunc started
	open atomic.Int32   // how many of those run
}

func (b *bench) session(name string) *session { return b.sessionOf(name, b.database) }

func (b *bench) sessionOf(name, database string) *session {
	ctx := context.Background()
	config, err := pgx.ParseConfig(b.lab.server.DSN(database))
	if err != nil {
		b.failf("%s: %w", name, err)
	}
	config.RuntimeParams["application_name"] = name
	config.RuntimeParams["statement_timeout"] = fmt.Sprint(patience.Milliseconds())
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		b.failf("%s: %w", name, err)
	}
	s := &session{b: b, name: name, conn: conn, pid: conn.PgConn().PID()}
	b.sessions = append(b.sessions, s)
	return s
}

func (s *session) close() {
	if s.open.Load() > 0 {
		_ = s.conn.PgConn().CancelRequest(context.Background())
	}
	s.wait.Wait()
	_ = s.conn.Close(context.Background())
}

// try runs a statement.
func (s *session) try(text string, args ...any) error {
	_, err := s.conn.Exec(context.Background(), text, args...)
	return err
}

// do runs a statement that must succeed.
func (s *session) do(text string, args ...any) {
	if err := s.try(text, args...); err != nil {
		s.b.failf("%s: %s: %w", s.name, text, err)
	}
}

// value runs a statement that gives one value.
func value[T any](s *session, text string, args ...any) T {
	var v T
	if err := s.conn.QueryRow(context.Background(), text, args...).Scan(&v); err != nil {
		s.b.failf("%s: %s: %w", s.name, text, err)
	}
	return v
}

// pending is a statement that is under way.
type pending struct {
	s    *session
	text string
	done chan struct{}
	err  error
}

// begin sends a statement and does not wait for its end.
func (s *session) begin(text string, args ...any) *pending {
	return s.beginFunc(text, func() error { return s.try(text, args...) })
}

func (s *session) beginFunc(text string, f func() error) *pending {
	p := &pending{s: s, text: text, done: make(chan struct{})}
	s.open.Add(1)
	s.wait.Go(func() {
		defer close(p.done)
		defer s.open.Add(-1)
		defer func() {
			if f, ok := recover().(failure); ok {
				p.err = f.err
			}
		}()
		p.err = f()
	})
	return p
}

// blocked waits until the statement waits for a lock, and reports false if it ended instead.
func (p *pending) blocked() bool {
	deadline := time.Now().Add(patience)
	for {
		select {
		case <-p.done:
			return false
		default:
		}
		var waits bool
		err := p.s.b.watch.QueryRow(context.Background(),
			"select coalesce(bool_or(wait_event_type = 'Lock'), false) from pg_stat_activity where pid = $1", p.s.pid).Scan(&waits)
		if err != nil {
			p.s.b.failf("watch %s: %w", p.s.name, err)
		}
		if waits {
			return true
		}
		if time.Now().After(deadline) {
			p.s.b.failf("%s: %s: neither ended nor waits for a lock", p.s.name, p.text)
		}
	}
}

// mustBlock fails unless the statement waits for a lock.
func (p *pending) mustBlock() {
	if !p.blocked() {
		p.s.b.failf("%s: %s: was to wait for a lock, but ended: %v", p.s.name, p.text, p.err)
	}
}

// end waits for the statement's end.
func (p *pending) end() {
	<-p.done
	if p.err != nil {
		p.s.b.failf("%s: %s: %w", p.s.name, p.text, p.err)
	}
}

// until repeats a step until it reports true.
func (b *bench) until(what string, step func() bool) {
	deadline := time.Now().Add(patience)
	for !step() {
		if time.Now().After(deadline) {
			b.failf("waited in vain until %s", what)
		}
	}
}

// leased is a row of weir.poll.
type leased struct {
	State     string
	ID        *int64
	Low, High *int64
	Attempt   *int32
}

// mode is how a consumer calls: own, as the library does, in transactions of their own; or as plain SQL does, in which case
// the call may be one of several statements of a transaction.
type mode bool

const (
	own   mode = true
	plain mode = false
)

func (m mode) String() string {
	if m == own {
		return "own"
	}
	return "plain"
}

// poll takes one turn as consumer s.name.
func (s *session) poll(m mode, most int, acks ...int64) []leased {
	rows, err := s.tryPoll(m, most, acks...)
	if err != nil {
		s.b.failf("%s: poll: %w", s.name, err)
	}
	return rows
}

func (s *session) tryPoll(m mode, most int, acks ...int64) ([]leased, error) {
	rows, err := s.conn.Query(context.Background(),
		"select * from weir.poll('t', 'g', $1, $2, '1 hour', 1000000, $3, $4)", s.name, most, acks, bool(m))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[leased])
}

// fetch reads the ids of a lease and counts them as handed out.
func (s *session) fetch(lease int64) []int64 {
	rows, err := s.conn.Query(context.Background(), "select id from weir.fetch($1)", lease)
	if err == nil {
		var ids []int64
		ids, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		if err == nil {
			for _, id := range ids {
				s.b.got[id]++
			}
			return ids
		}
	}
	s.b.failf("%s: fetch %d: %w", s.name, lease, err)
	return nil
}

// take is a turn that fetches and acknowledges what it is given, and returns it.
func (s *session) take(m mode) []int64 {
	var all []int64
	for _, l := range s.poll(m, 100) {
		if l.ID == nil {
			continue
		}
		all = append(all, s.fetch(*l.ID)...)
		s.do("select weir.ack($1, $2)", *l.ID, s.name)
	}
	return all
}

// produce inserts a message within the session's transaction and returns its id.
func (s *session) produce() int64 { return value[int64](s, "select weir.produce('t', '1')") }

// drain takes until the group has come to the end of the log, and then demands that each committed message was handed out
// exactly once.
func (b *bench) drain(m mode) {
	s := b.session("drain")
	empty := 0
	b.until("the log is drained", func() bool {
		if len(s.take(m)) > 0 {
			empty = 0
			return false
		}
		if value[bool](s, "select claimed >= head from weir.groups where grp = 'g'") {
			empty++
		}
		return empty > 1
	})
	b.complete()
}

// complete demands that each committed message was handed out exactly once.
func (b *bench) complete() {
	rows, err := b.watch.Query(context.Background(), "select id from weir.log_1 order by id")
	if err != nil {
		b.failf("read the log: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		b.failf("read the log: %w", err)
	}
	var skipped, twice []int64
	for _, id := range ids {
		switch n := b.got[id]; {
		case n == 0:
			skipped = append(skipped, id)
		case n > 1:
			twice = append(twice, id)
		}
	}
	if len(skipped) > 0 {
		b.failf("skipped: messages %v were committed and never handed out", skipped)
	}
	if len(twice) > 0 {
		b.failf("overlap: messages %v were handed out more than once", twice)
	}
	for id := range b.got {
		if !slices.Contains(ids, id) {
			b.failf("phantom: message %d was handed out and is not in the log", id)
		}
	}
}

// settled is the settled head.
func (b *bench) settled() int64 {
	return value[int64](b.sessions[0], "select settled from weir.topics")
}

// bug is a breakage of the SQL, kept as data in testdata/bugs.txt.
type bug testdata.Bug

// readBugs reads the catalogue.
func readBugs(t testing.TB) (bugs []bug) {
	t.Helper()
	list, err := testdata.Bugs()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range list {
		bugs = append(bugs, bug(b))
	}
	return bugs
}

// apply puts the bug into a database.
func (g bug) apply(b *bench) {
	texts, err := testdata.Bug(g).Texts()
	if err != nil {
		b.lab.t.Fatal(err)
	}
	for file, text := range texts {
		if _, err := b.watch.PgConn().Exec(context.Background(), text).ReadAll(); err != nil {
			b.lab.t.Fatalf("bug %q: %s: %v", g.Name, file, err)
		}
	}
}
