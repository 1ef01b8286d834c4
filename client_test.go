package weir_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

func TestCancelledCallsStayWithinThePool(t *testing.T) {
	t.Parallel()
	_, dsn := open(t, nil)
	conn := connect(t, dsn)
	const size = 4
	pool := newPool(t, dsn, func(config *pgxpool.Config) {
		config.MaxConns = size
		config.ConnConfig.RuntimeParams["application_name"] = "cancelled"
	})
	c := newOn(t, pool, nil)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	var calls, most atomic.Int64
	var work sync.WaitGroup
	began := time.Now()
	for w := range 20 {
		work.Go(func() {
			for i := range 100 {
				// Some end before the call, some in it, some after it.
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration((w*100+i)%40)*100*time.Microsecond)
				_, err := c.Produce(ctx, "t", numbers(1)...)
				if err != nil && ctx.Err() == nil {
					t.Errorf("a call that was not cancelled: %v", err)
				}
				cancel()
				calls.Add(1)
				if i%20 == 0 {
					most.Store(max(most.Load(), int64(pool.Stat().TotalConns())))
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { work.Wait(); close(done) }()
	backends := 0
	for working := true; working; {
		select {
		case <-done:
			working = false
		case <-time.After(10 * time.Millisecond):
		}
		backends = max(backends, value[int](t, conn, "select count(*)::int from pg_stat_activity where application_name = 'cancelled'"))
	}
	rate := float64(calls.Load()) / time.Since(began).Seconds()
	t.Logf("%.0f calls a second, at most %d connections of the pool's, %d backends", rate, most.Load(), backends)
	// A backend whose connection was closed in the midst of a statement takes a moment to notice.
	if most.Load() > size {
		t.Errorf("the pool had %d connections, want at most %d", most.Load(), size)
	}
	eventually(t, "no more backends than the pool has", func() bool {
		return value[int](t, conn, "select count(*)::int from pg_stat_activity where application_name = 'cancelled'") <= size
	})
	if _, err := c.Produce(t.Context(), "t", numbers(1)...); err != nil {
		t.Errorf("after it: %v", err)
	}
}

// Restarts, crashes and killed backends in the midst of work: everything resumes by itself, and nothing is lost.
func TestServerRestarts(t *testing.T) {
	t.Parallel()
	server := pgtest.New(t, nil)
	c, dsn := openOn(t, server, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	handled, sent := newTally(), newTally()
	var uncertain atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var work sync.WaitGroup
	for range 2 {
		work.Go(func() {
			for ctx.Err() == nil {
				ids, err := c.Produce(context.Background(), "t", numbers(10)...)
				switch {
				case err == nil:
					sent.add(idsOf(ids)...)
				case weir.CanRetry(err):
					uncertain.Add(10)
					time.Sleep(5 * time.Millisecond) // a program's own pace of retries
				default:
					t.Errorf("produce: %v", err)
					return
				}
			}
		})
	}
	var runs []*consumption
	for range 2 {
		runs = append(runs, consume(t, c, "t", "g", handleInto(handled), &weir.ConsumerOptions{Lease: 2 * time.Second, Concurrency: 2}))
	}
	atWork := func(what string) {
		t.Helper()
		s, h := sent.distinct(), handled.distinct()
		took := within(t, 10*time.Second, what+": both resume", func() bool { return sent.distinct() > s && handled.distinct() > h+50 })
		t.Logf("%s: resumed after %v", what, took.Round(time.Millisecond))
	}
	atWork("start")
	for range 2 {
		noError(t, server.Restart(context.Background()))
		atWork("restart")
		noError(t, server.Exec(context.Background(), "postgres",
			"select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"))
		atWork("backends killed")
	}
	noError(t, server.Crash(context.Background()))
	noError(t, server.StartAgain(context.Background()))
	atWork("crash")
	cancel()
	work.Wait()
	conn := connect(t, dsn)
	ids := column[int64](t, conn, "select id from weir.log_1 order by id")
	eventually(t, "everything in the log is handled", func() bool { return len(handled.missing(ids)) == 0 })
	drained(t, c, "t", "g")
	for _, r := range runs {
		r.stop()
	}
	inLog := map[int64]bool{}
	for _, id := range ids {
		inLog[id] = true
	}
	lost, foreign := 0, 0
	for id := range sent.times {
		if !inLog[id] {
			lost++
		}
	}
	for id := range handled.times {
		if !inLog[id] {
			foreign++
		}
	}
	if lost > 0 || foreign > 0 {
		t.Errorf("%d that were stored are not in the log, %d were handled that are not in it", lost, foreign)
	}
	t.Logf("%d in the log, %d stored for certain, %d of unknown outcome, %d handled again",
		len(ids), sent.distinct(), uncertain.Load(), handled.calls()-handled.distinct())
}

// A bad option is refused with its name, and has no effect.
func TestBadOptions(t *testing.T) {
	t.Parallel()
	c, dsn := open(t, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	ctx := t.Context()
	handler := handleInto(newTally())
	consumer := func(o weir.ConsumerOptions) error {
		_, err := c.NewConsumer("t", "g", handler, &o)
		return err
	}
	topic := func(o weir.TopicOptions) error { return c.CreateTopic(ctx, "new", &o) }
	group := func(o weir.GroupOptions) error { return c.CreateGroup(ctx, "t", "new", &o) }
	client := func(o weir.Options) error {
		own, err := weir.Open(ctx, dsn, &o)
		if err == nil {
			own.Close()
		}
		return err
	}
	for field, errs := range map[string][]error{
		"Concurrency":    {consumer(weir.ConsumerOptions{Concurrency: -1}), consumer(weir.ConsumerOptions{Concurrency: 10_001})},
		"BatchSize":      {consumer(weir.ConsumerOptions{BatchSize: -1}), consumer(weir.ConsumerOptions{BatchSize: 10_001})},
		"Prefetch":       {consumer(weir.ConsumerOptions{Prefetch: -1}), consumer(weir.ConsumerOptions{Prefetch: 100_001})},
		"PrefetchBytes":  {consumer(weir.ConsumerOptions{PrefetchBytes: -1})},
		"Lease":          {consumer(weir.ConsumerOptions{Lease: -1}), consumer(weir.ConsumerOptions{Lease: time.Millisecond}), consumer(weir.ConsumerOptions{Lease: 25 * time.Hour})},
		"HandlerTimeout": {consumer(weir.ConsumerOptions{HandlerTimeout: 1})},
		"StopTimeout":    {consumer(weir.ConsumerOptions{StopTimeout: 1})},
		"PollInterval":   {consumer(weir.ConsumerOptions{PollInterval: -1}), consumer(weir.ConsumerOptions{PollInterval: time.Hour})},
		"Name":           {consumer(weir.ConsumerOptions{Name: "a\nb"}), consumer(weir.ConsumerOptions{Name: strings.Repeat("x", 201)}), consumer(weir.ConsumerOptions{Name: "\xff"})},
		"handler":        {second(c.NewConsumer("t", "g", weir.Handler{}, nil))},
		"pool":           {second(weir.New(nil, nil))},
		"dsn":            {second(weir.Open(ctx, "postgres://%", nil)), second(weir.Open(ctx, "nonsense", nil))},
		"schema":         {client(weir.Options{Schema: "Upper"}), client(weir.Options{Schema: "a b"}), client(weir.Options{Schema: `a"b`}), client(weir.Options{Schema: "pg_weir"}), client(weir.Options{Schema: "1a"}), client(weir.Options{Schema: strings.Repeat("x", 41), Migrate: true})},
		"format":         {topic(weir.TopicOptions{Format: "xml"})},
		"segment_size":   {topic(weir.TopicOptions{SegmentSize: -1}), topic(weir.TopicOptions{SegmentSize: 999}), topic(weir.TopicOptions{SegmentSize: 1_000_000_001})},
		"max_attempts":   {group(weir.GroupOptions{MaxAttempts: -1}), group(weir.GroupOptions{MaxAttempts: 1001})},
		"retry_delay":    {group(weir.GroupOptions{RetryDelay: 8 * 24 * time.Hour})},
		"retry_max":      {group(weir.GroupOptions{RetryMax: -1}), group(weir.GroupOptions{RetryMax: 31 * 24 * time.Hour}), group(weir.GroupOptions{RetryMax: time.Millisecond})},
		"split_after":    {group(weir.GroupOptions{SplitAfter: -1}), group(weir.GroupOptions{SplitAfter: 1001})},
		"start":          {group(weir.GroupOptions{Start: weir.AtID(-1)}), group(weir.GroupOptions{Start: weir.AtID(0)}), group(weir.GroupOptions{Start: weir.AtID(1 << 60)})},
		"max_messages":   {second(c.Read(ctx, "t", 0, 0)), second(c.Read(ctx, "t", 0, 10_001)), second(c.Read(ctx, "t", 0, -1))},
		"after":          {second(c.Read(ctx, "t", -1, 1))},
	} {
		for i, err := range errs {
			if !errors.Is(err, weir.ErrInvalid) || !strings.Contains(err.Error(), field) {
				t.Errorf("%s, %d: error is %v, want ErrInvalid that names the field", field, i, err)
			}
		}
	}
	if topics, err := c.Topics(ctx); err != nil || len(topics) != 1 {
		t.Errorf("topics are %v, %v", topics, err)
	}
	if groups, err := c.Groups(ctx, ""); err != nil || len(groups) != 1 {
		t.Errorf("groups are %v, %v", groups, err)
	}
	if n := value[int](t, connect(t, dsn), "select count(*) from pg_namespace where nspname ~ '^x|^Upper|^a|weir.'"); n != 0 {
		t.Errorf("%d schemas were made", n)
	}
	// The limits themselves are allowed.
	for _, o := range []weir.ConsumerOptions{
		{Concurrency: 10_000, Prefetch: 100_000, BatchSize: 10_000, Lease: 24 * time.Hour, PollInterval: time.Minute},
		{Concurrency: 1, Prefetch: 1, PrefetchBytes: 1, Lease: 100 * time.Millisecond, PollInterval: 10 * time.Millisecond},
		{HandlerTimeout: -1, StopTimeout: -1, Name: "näme with spaces"},
	} {
		if err := consumer(o); err != nil {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// second is the error of a call.
func second[T any](_ T, err error) error { return err }

func TestConflicts(t *testing.T) {
	t.Parallel()
	c, _ := open(t, nil)
	ctx := t.Context()
	noError(t, c.CreateTopic(ctx, "t", &weir.TopicOptions{Format: weir.Bytes}))
	noError(t, c.CreateTopic(ctx, "t", nil))
	wantError(t, c.CreateTopic(ctx, "t", &weir.TopicOptions{Format: weir.JSON}), weir.ErrConflict, "t", "bytes")
	wantError(t, c.CreateGroup(ctx, "missing", "g", nil), weir.ErrTopicNotFound, "missing")
	wantError(t, second(c.Group(ctx, "t", "missing")), weir.ErrGroupNotFound, "missing")
	wantError(t, second(c.Topic(ctx, "missing")), weir.ErrTopicNotFound, "missing")
	wantError(t, second(c.DeadLetter(ctx, "t", "missing", 1)), weir.ErrGroupNotFound)
	noError(t, c.CreateGroup(ctx, "t", "g", nil))
	wantError(t, second(c.DeadLetter(ctx, "t", "g", 1)), weir.ErrNoMessage)
	wantError(t, second(c.DropGroup(ctx, "missing", "g", nil)), weir.ErrTopicNotFound)
	for _, drop := range []func() (bool, error){
		func() (bool, error) { return c.DropGroup(ctx, "t", "missing", nil) },
		func() (bool, error) { return c.DropTopic(ctx, "missing", nil) },
	} {
		if dropped, err := drop(); dropped || err != nil {
			t.Errorf("drop of what is not there: %v, %v", dropped, err)
		}
	}
}

func TestPoolSizeOfTheDSN(t *testing.T) {
	t.Parallel()
	_, dsn := open(t, nil)
	conn := connect(t, dsn)
	c, err := weir.Open(t.Context(), dsn+"&pool_max_conns=2&application_name=narrow", nil)
	noError(t, err)
	defer c.Close()
	var work sync.WaitGroup
	for range 8 {
		work.Go(func() {
			for range 20 {
				if _, err := c.Topics(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	if n := value[int](t, conn, "select count(*) from pg_stat_activity where application_name = 'narrow'"); n > 2 {
		t.Errorf("%d connections, the DSN allows 2", n)
	}
}

// A server whose default isolation is another changes nothing.
func TestDefaultIsolation(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		_, dsn := open(t, nil)
		conn := connect(t, dsn)
		execute(t, conn, "alter database "+pgx.Identifier{value[string](t, conn, "select current_database()::text")}.Sanitize()+
			" set default_transaction_isolation = '"+level+"'")
		c := openDSN(t, dsn, nil)
		topicAndGroup(t, c, "t", "g", nil, nil)
		handled := newTally()
		var ids []int64
		k := consume(t, c, "t", "g", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
			handled.add(m.ID)
			if m.Value == 5 && m.Attempt == 1 {
				return weir.RetryIn(0, errors.New("again"))
			}
			return nil
		}), &weir.ConsumerOptions{Concurrency: 4})
		_ = k
		for range 10 {
			ids = append(ids, produced(t, c, "t", numbers(4)...)...)
		}
		eventually(t, "all are handled under "+level, func() bool { return len(handled.missing(ids)) == 0 })
		drained(t, c, "t", "g")
		k.stop()
	}
}

// A standby can be read, and says what it is to whoever wants more.
func TestStandby(t *testing.T) {
	t.Parallel()
	primary := pgtest.New(t, &pgtest.Options{Fast: true, Settings: map[string]string{"wal_level": "replica"}})
	c, dsn := openOn(t, primary, nil)
	topicAndGroup(t, c, "t", "g", nil, nil)
	produced(t, c, "t", numbers(10)...)
	stored(t, c, "t") // the settled head is past them

	parent, err := os.MkdirTemp("", "weir-standby-")
	noError(t, err)
	t.Cleanup(func() { os.RemoveAll(parent) })
	noError(t, os.Chmod(parent, 0o777))
	dir := filepath.Join(parent, "data")
	backup := primary.Command("pg_basebackup", "-D", dir, "-X", "stream", "-c", "fast", "-R")
	if out, err := backup.CombinedOutput(); err != nil {
		t.Fatalf("pg_basebackup: %v\n%s", err, out)
	}
	standby := pgtest.New(t, &pgtest.Options{DataDir: dir, Fast: true})
	config, err := pgx.ParseConfig(dsn)
	noError(t, err)
	conn := connect(t, standby.DSN(config.Database))
	if !value[bool](t, conn, "select pg_is_in_recovery() and exists (select from pg_stat_file('standby.signal'))") {
		t.Fatal("it is no standby")
	}
	log := newTestLog(t)
	s, err := weir.Open(t.Context(), standby.DSN(config.Database), &weir.Options{Logger: log.Logger})
	noError(t, err)
	t.Cleanup(s.Close)
	got, err := s.Read(t.Context(), "t", 0, 100)
	if err != nil || len(got) != 10 || string(got[9].Raw) != "10" {
		t.Errorf("the standby gives %d messages, %v; want 10", len(got), err)
	}
	if g, err := s.Group(t.Context(), "t", "g"); err != nil || g.Lag != 10 {
		t.Errorf("group on the standby: %+v, %v", g, err)
	}
	ctx := t.Context()
	for name, err := range map[string]error{
		"Produce":     second(s.Produce(ctx, "t", numbers(1)...)),
		"Copy":        second(s.Copy(ctx, "t", sequence(numbers(1)))),
		"CreateTopic": s.CreateTopic(ctx, "new", nil),
		"CreateGroup": s.CreateGroup(ctx, "t", "new", nil),
		"DropTopic":   second(s.DropTopic(ctx, "t", nil)),
		"DropGroup":   second(s.DropGroup(ctx, "t", "g", nil)),
		"Seek":        second(s.Seek(ctx, "t", "g", weir.Beginning())),
		"Redrive":     second(s.Redrive(ctx, "t", "g", 0)),
		"Purge":       second(s.Purge(ctx, "t", "g", 0)),
		"ProduceTx": pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			_, err := s.ProduceTx(ctx, tx, "t", numbers(1)...)
			return err
		}),
		"claim": explained(conn.Exec(ctx, "select * from weir.claim('t', 'g', 'c')")),
	} {
		if !errors.Is(err, weir.ErrStandby) {
			t.Errorf("%s: error is %v, want ErrStandby", name, err)
		}
	}
	other, err := weir.Open(ctx, standby.DSN(config.Database), &weir.Options{Schema: "elsewhere", Migrate: true})
	if err == nil {
		other.Close()
	}
	wantError(t, err, weir.ErrStandby)

	// A consumer waits for the standby to become the primary, and then works.
	handled := newTally()
	k := consume(t, s, "t", "g", handleInto(handled), nil)
	eventually(t, "it says what it waits for", func() bool { return strings.Contains(log.String(), "this server is a standby") })
	execute(t, conn, "select pg_promote()")
	eventually(t, "it works after the promotion", func() bool { return handled.distinct() == 10 })
	ids := produced(t, s, "t", numbers(3)...)
	eventually(t, "new ones arrive", func() bool { return len(handled.missing(ids)) == 0 })
	k.stop()
}

// explained tells the errors of plain SQL apart as the library does.
func explained[T any](_ T, err error) error {
	if err != nil && strings.Contains(err.Error(), "(SQLSTATE WE006)") {
		return fmt.Errorf("%w: %w", weir.ErrStandby, err)
	}
	return err
}

func TestCloseIsFinal(t *testing.T) {
	t.Parallel()
	_, dsn := open(t, nil)
	pool := newPool(t, dsn, nil)
	c, err := weir.New(pool, &weir.Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	noError(t, err)
	noError(t, c.CreateTopic(t.Context(), "t", nil))
	c.Close()
	c.Close()
	c.Wake("t") // does nothing, and does not hang
	if err := pool.Ping(t.Context()); err != nil {
		t.Errorf("the pool of the caller's was closed: %v", err)
	}
	own, err := weir.Open(t.Context(), dsn, nil)
	noError(t, err)
	own.Close()
	own.Close()
	if _, err := own.Topics(t.Context()); err == nil {
		t.Error("a closed client works")
	}
}

// An idle client logs nothing.
func TestQuiet(t *testing.T) {
	t.Parallel()
	log := newTestLog(t)
	c, _ := open(t, &weir.Options{Logger: log.Logger})
	topicAndGroup(t, c, "t", "g", nil, nil)
	handled := newTally()
	k := consume(t, c, "t", "g", handleInto(handled), &weir.ConsumerOptions{PollInterval: 20 * time.Millisecond, Lease: 200 * time.Millisecond})
	ids := produced(t, c, "t", numbers(100)...)
	eventually(t, "all are handled", func() bool { return len(handled.missing(ids)) == 0 })
	drained(t, c, "t", "g")
	k.stop()
	if text := log.String(); text != "" {
		t.Errorf("it logged:\n%s", text)
	}
	if _, err := c.DropTopic(t.Context(), "t", nil); err != nil || !slices.Equal([]weir.Topic{}, must(t, c)) {
		t.Errorf("after the drop: %v", err)
	}
}

func must(t *testing.T, c *weir.Client) []weir.Topic {
	t.Helper()
	topics, err := c.Topics(t.Context())
	noError(t, err)
	return append([]weir.Topic{}, topics...)
}
