package weir_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// childEnv names what the test binary does, as a process of its own, instead of running tests.
const childEnv = "WEIR_TEST_CHILD"

// children are what the test binary can do as a process of its own, by the value of childEnv.
var children = map[string]func(){}

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		child := children[name]
		if child == nil {
			fmt.Fprintf(os.Stderr, "%s=%s: there is no such child\n", childEnv, name)
			os.Exit(2)
		}
		child()
		os.Exit(0)
	}
	pgtest.OnCleanup(checkInstalls)
	os.Exit(pgtest.Main(m))
}

// checkInstalls runs every invariant against every install in a test database that is about to be dropped.
func checkInstalls(t pgtest.TB, dsn string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	defer pool.Close()
	rows, err := pool.Query(ctx, `
		select n.nspname::text from pg_namespace as n
		where exists (select from pg_class as c where c.relnamespace = n.oid and c.relname = 'fence')
		  and exists (select from pg_class as c where c.relnamespace = n.oid and c.relname = 'meta')
		order by 1`)
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	schemas, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	for _, schema := range schemas {
		c, err := weir.New(pool, &weir.Options{Schema: schema, NoListen: true, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatalf("check: %v", err)
		}
		results, err := c.Check(ctx)
		c.Close()
		if err != nil {
			t.Fatalf("check schema %s: %v", schema, err)
		}
		var broken []string
		for _, r := range results {
			for _, v := range r.Violations {
				broken = append(broken, fmt.Sprintf("%s (%s): %s", r.Name, r.Holds, v))
			}
		}
		if len(broken) > 0 {
			t.Fatalf("schema %s breaks invariants:\n%s", schema, strings.Join(broken, "\n"))
		}
	}
}

// open gives a client on an empty database of the shared server, with Weir installed, and the database's DSN. Its log is
// shown when the test fails.
func open(t *testing.T, o *weir.Options) (*weir.Client, string) {
	t.Helper()
	return openOn(t, pgtest.Shared(t), o)
}

// openOn is open on another server.
func openOn(t *testing.T, s *pgtest.Server, o *weir.Options) (*weir.Client, string) {
	t.Helper()
	dsn := s.Database(t)
	return openDSN(t, dsn, o), dsn
}

// openDSN opens a client on a database, and installs Weir in it where it is missing.
func openDSN(t *testing.T, dsn string, o *weir.Options) *weir.Client {
	t.Helper()
	c, err := weir.Open(t.Context(), dsn, completed(t, o))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// newOn makes a client on a pool, and installs Weir where it is missing.
func newOn(t *testing.T, pool *pgxpool.Pool, o *weir.Options) *weir.Client {
	t.Helper()
	c, err := weir.New(pool, completed(t, o))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if err := c.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c
}

func completed(t *testing.T, o *weir.Options) *weir.Options {
	var own weir.Options
	if o != nil {
		own = *o
	}
	own.Migrate = true
	if own.Logger == nil {
		own.Logger = newTestLog(t).Logger
	}
	return &own
}

// testLog keeps what is logged, and shows it when the test fails.
type testLog struct {
	*slog.Logger
	mu   sync.Mutex
	text bytes.Buffer
}

func newTestLog(t *testing.T) *testLog {
	l := &testLog{}
	l.Logger = slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
	t.Cleanup(func() {
		if text := l.String(); t.Failed() && text != "" {
			t.Logf("log:\n%s", text)
		}
	})
	return l
}

func (l *testLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *testLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// newPool opens a pool of the test's own, closed at its end.
func newPool(t *testing.T, dsn string, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	noError(t, err)
	if change != nil {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	noError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// connect opens a connection that is closed at the test's end.
func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

// querier is a connection, a pool or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// value runs a query of one row and one column.
func value[T any](t *testing.T, q querier, sql string, args ...any) T {
	t.Helper()
	rows, err := q.Query(t.Context(), sql, args...)
	if err == nil {
		var v T
		if v, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[T]); err == nil {
			return v
		}
	}
	t.Fatalf("%s: %v", sql, err)
	panic("not reached")
}

// column runs a query of one column.
func column[T any](t *testing.T, q querier, sql string, args ...any) []T {
	t.Helper()
	rows, err := q.Query(t.Context(), sql, args...)
	if err == nil {
		var v []T
		if v, err = pgx.CollectRows(rows, pgx.RowTo[T]); err == nil {
			return v
		}
	}
	t.Fatalf("%s: %v", sql, err)
	panic("not reached")
}

// execute runs a statement.
func execute(t *testing.T, q querier, sql string, args ...any) {
	t.Helper()
	if _, err := q.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// noError ends the test at an error.
func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantError demands an error that is the sentinel, and whose text has each of the parts.
func wantError(t *testing.T, err, sentinel error, parts ...string) {
	t.Helper()
	if !errors.Is(err, sentinel) {
		t.Errorf("error is %v, want one that is %q", err, sentinel)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not name %q", err, part)
		}
	}
}

// eventually waits until cond holds, at most 30 s.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	within(t, 30*time.Second, what, cond)
}

// within waits until cond holds, at most d, and returns how long that took.
func within(t *testing.T, d time.Duration, what string, cond func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for !cond() {
		if time.Since(began) > d {
			t.Fatalf("not within %v: %s", d, what)
		}
		time.Sleep(2 * time.Millisecond)
	}
	return time.Since(began)
}

// topicAndGroup creates both.
func topicAndGroup(t *testing.T, c *weir.Client, topic, group string, to *weir.TopicOptions, gro *weir.GroupOptions) {
	t.Helper()
	noError(t, c.CreateTopic(t.Context(), topic, to))
	noError(t, c.CreateGroup(t.Context(), topic, group, gro))
}

// consumption is a consumer at work.
type consumption struct {
	*weir.Consumer
	t      *testing.T
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// consume runs a consumer until stop, or the test's end.
func consume(t *testing.T, c *weir.Client, topic, group string, h weir.Handler, o *weir.ConsumerOptions) *consumption {
	t.Helper()
	k, err := c.NewConsumer(topic, group, h, o)
	noError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	run := &consumption{Consumer: k, t: t, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(run.done)
		run.err = k.Run(ctx)
	}()
	t.Cleanup(run.stop)
	return run
}

// stop ends the consumer and waits for it. An error of its Run fails the test.
func (r *consumption) stop() {
	r.t.Helper()
	r.cancel()
	select {
	case <-r.done:
	case <-time.After(time.Minute):
		r.t.Fatal("the consumer did not stop within a minute")
	}
	if r.err != nil {
		r.t.Errorf("Run: %v", r.err)
	}
}

// tally counts how often each message was handled.
type tally struct {
	mu    sync.Mutex
	times map[int64]int
	total int
}

func newTally() *tally { return &tally{times: map[int64]int{}} }

func (y *tally) add(ids ...int64) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, id := range ids {
		y.times[id]++
		y.total++
	}
}

// distinct is how many messages were handled at least once.
func (y *tally) distinct() int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return len(y.times)
}

// calls is how often a message was handled, in all.
func (y *tally) calls() int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.total
}

func (y *tally) count(id int64) int {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.times[id]
}

// missing are those of ids that were not handled.
func (y *tally) missing(ids []int64) (missing []int64) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, id := range ids {
		if y.times[id] == 0 {
			missing = append(missing, id)
		}
	}
	return missing
}

// numbers are n messages with the payloads 1 to n.
func numbers(n int) []weir.Message {
	messages := make([]weir.Message, n)
	for i := range messages {
		messages[i].Payload = i + 1
	}
	return messages
}

// produced stores messages and gives their ids.
func produced(t *testing.T, c *weir.Client, topic string, messages ...weir.Message) []int64 {
	t.Helper()
	stored, err := c.Produce(t.Context(), topic, messages...)
	noError(t, err)
	if len(stored) != len(messages) {
		t.Fatalf("%d messages gave %d results", len(messages), len(stored))
	}
	return idsOf(stored)
}

// idsOf are the ids of what was produced.
func idsOf(produced []weir.Produced) []int64 {
	ids := make([]int64, len(produced))
	for i, p := range produced {
		ids[i] = p.ID
	}
	return ids
}

// group gives the figures of a group.
func group(t *testing.T, c *weir.Client, topic, name string) weir.Group {
	t.Helper()
	g, err := c.Group(t.Context(), topic, name)
	noError(t, err)
	return g
}

// drained waits until a group has handled everything: no message lags, no lease is out, none is retried.
func drained(t *testing.T, c *weir.Client, topic, name string) {
	t.Helper()
	eventually(t, "group "+name+" is drained", func() bool {
		g := group(t, c, topic, name)
		return g.Lag == 0 && g.Leases == 0 && g.Retrying == 0 && g.Waiting == 0
	})
}
