package matrix

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/history"
	"github.com/weirhq/weir/sql"
)

// patience bounds every wait for a condition. It decides nothing but how long a failure takes.
const patience = time.Minute

// Cell is the suite on one database, reached in one way.
type Cell struct {
	// Direct is the DSN of the database for a superuser, who looks at what happened.
	Direct string
	// DSN is the way that is tried.
	DSN string
	// Pooled: it leads through a pooler, where there is no LISTEN.
	Pooled bool
	// Synchronous is the synchronous_commit that sessions are to have there; "": whatever it is.
	Synchronous string
	// Guest: whoever comes by DSN does not own Weir, which is there already, and calls functions alone.
	Guest bool
	// Begin, if not nil, is run on each connection that the suite's clients make.
	Begin func(ctx context.Context, conn *pgx.Conn) error
}

// cell is a Cell that runs. Its steps end it with an error when they fail.
type cell struct {
	Cell
	ctx   context.Context
	admin *pgx.Conn
	pool  *pgxpool.Pool
	c     *weir.Client
	rec   *history.Recorder
	log   lockedBuffer

	work   sync.WaitGroup
	stop   context.CancelFunc
	mu     sync.Mutex
	failed error // of what runs beside the steps

	// fixed: handlers handle what they had refused until then
	fixed   bool
	handled int
}

// failure is what a step panics with.
type failure struct{ error }

// must ends the cell at an error.
func must(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// ensure ends the cell where something does not hold.
func ensure(holds bool, format string, args ...any) {
	if !holds {
		panic(failure{fmt.Errorf(format, args...)})
	}
}

// got is the value of a call that must not fail.
func got[T any](v T, err error) T {
	must(err)
	return v
}

// Run installs Weir in an empty database, unless a Guest comes, and takes every step. It returns how many messages were handled.
func (of Cell) Run(ctx context.Context) (handled int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	l := &cell{Cell: of, ctx: ctx, rec: history.New()}
	step := "connect"
	defer func() {
		if v := recover(); v != nil {
			f, ok := v.(failure)
			if !ok {
				panic(v)
			}
			err = fmt.Errorf("%s: %w", step, f.error)
			l.mu.Lock()
			if l.failed != nil && !errors.Is(f.error, l.failed) {
				err = fmt.Errorf("%w; beside it: %w", err, l.failed)
			}
			l.mu.Unlock()
			if text := l.log.String(); text != "" {
				err = fmt.Errorf("%w\nlog:\n%s", err, text)
			}
		}
	}()
	l.admin = got(pgx.Connect(ctx, l.Direct))
	defer l.admin.Close(context.WithoutCancel(ctx))
	got(l.admin.Exec(ctx, "set search_path = pg_catalog"))
	defer func() {
		if l.stop != nil {
			l.stop()
		}
		l.work.Wait()
		if l.c != nil {
			l.c.Close()
		}
		if l.pool != nil {
			l.pool.Close()
		}
	}()
	for _, s := range []struct {
		name string
		take func()
	}{
		{"install", l.install},
		{"functions", l.functions},
		{"produce and consume", l.main},
		{"dead letters", l.dead},
		{"seek", l.seek},
		{"late commit", l.late},
		{"lost answers", l.lostAnswers},
		{"formats", l.formats},
		{"storage", l.storage},
		{"calls", l.calls},
		{"judgement", l.judge},
		{"check", l.check},
	} {
		step = s.name
		s.take()
		l.mu.Lock()
		must(l.failed)
		l.mu.Unlock()
	}
	return l.handled, nil
}

// beside runs something until the end of the cell, whose error is the cell's.
func (l *cell) beside(f func(ctx context.Context) error) {
	if l.stop == nil {
		l.ctx, l.stop = context.WithCancel(l.ctx)
	}
	ctx := l.ctx
	l.work.Go(func() {
		if err := f(ctx); err != nil && ctx.Err() == nil {
			l.mu.Lock()
			defer l.mu.Unlock()
			l.failed = errors.Join(l.failed, err)
		}
	})
}

// together runs functions at once and waits for all of them.
func together(each ...func() error) {
	errs := make([]error, len(each))
	var work sync.WaitGroup
	for i, f := range each {
		work.Go(func() { errs[i] = f() })
	}
	work.Wait()
	must(errors.Join(errs...))
}

// until waits for a condition.
func (l *cell) until(what string, holds func() bool) {
	for began := time.Now(); !holds(); {
		l.mu.Lock()
		must(l.failed)
		l.mu.Unlock()
		ensure(time.Since(began) < patience, "not within %v: %s", patience, what)
		select {
		case <-l.ctx.Done():
			must(context.Cause(l.ctx))
		case <-time.After(3 * time.Millisecond):
		}
	}
}

// number asks for one number, past the way that is tried.
func (l *cell) number(query string, args ...any) (n int64) {
	must(l.admin.QueryRow(l.ctx, query, args...).Scan(&n))
	return n
}

func (l *cell) config() *pgxpool.Config {
	config := got(pgxpool.ParseConfig(l.DSN))
	config.AfterConnect = l.Begin
	return config
}

func (l *cell) options() *weir.Options {
	return &weir.Options{
		NoListen: l.Pooled,
		Logger:   slog.New(slog.NewTextHandler(&l.log, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
}

// install installs Weir the way that programs do, twice.
func (l *cell) install() {
	o := l.options()
	o.Migrate = !l.Guest
	for range 2 {
		got(weir.Open(l.ctx, l.DSN, o)).Close()
	}
	config := l.config()
	config.MaxConns = 10
	l.pool = got(pgxpool.NewWithConfig(l.ctx, config))
	l.c = got(weir.New(l.pool, l.options()))
	var setting string
	must(l.pool.QueryRow(l.ctx, "select current_setting('synchronous_commit')").Scan(&setting))
	ensure(l.Synchronous == "" || setting == l.Synchronous, "synchronous_commit is %s", setting)
	got(l.admin.Exec(l.ctx, "create schema handled; create table handled.effect (grp text not null, id bigint not null)"))
	got(l.admin.Exec(l.ctx, "grant usage on schema handled to public; grant insert on handled.effect to public"))
}

// functions has the server look at the text of every function, which the install leaves out, and takes it back.
func (l *cell) functions() {
	if l.Guest {
		return
	}
	tx := got(l.admin.Begin(l.ctx))
	defer func() { _ = tx.Rollback(context.WithoutCancel(l.ctx)) }()
	got(tx.Exec(l.ctx, "set local check_function_bodies = on"))
	for _, file := range sql.List("functions") {
		if _, err := l.admin.PgConn().Exec(l.ctx, sql.Text(sql.DefaultSchema, file)).ReadAll(); err != nil {
			must(fmt.Errorf("%s: %w", file, err))
		}
	}
}

// groups are those of the topic t: of each mode, with plain handlers and with those that have the transaction.
var groups = map[string]weir.Mode{
	"stream": weir.Stream, "ordered": weir.Ordered, "queue": weir.Queue,
	"stream-tx": weir.Stream, "ordered-tx": weir.Ordered, "queue-tx": weir.Queue,
}

// main produces in every way, while the groups handle. Messages whose value ends with "again" fail the first time, those with
// "dead" each time.
func (l *cell) main() {
	must(l.c.CreateTopic(l.ctx, "t", nil))
	for name, mode := range groups {
		o := &weir.GroupOptions{Mode: mode, MaxAttempts: 3, RetryDelay: -1}
		if mode == weir.Ordered {
			o.Shards = 4
		}
		must(l.c.CreateGroup(l.ctx, "t", name, o))
	}
	first := func(who string, n int) (list []weir.Message) {
		for i := range n {
			value := fmt.Sprintf("%s-%d", who, i)
			key := fmt.Sprintf("k%d", i%6)
			switch {
			case i%10 == 3:
				value += "-again"
			case i%40 == 7:
				value += "-dead"
				key = value // nothing comes after it in its key
			}
			list = append(list, weir.Message{Key: key, Payload: value})
		}
		return list
	}
	// Some are there before the consumers, and the others come while those work.
	must(l.produce(first("before", 20)))
	for name := range groups {
		l.consume("t", name, strings.HasSuffix(name, "-tx"))
	}
	l.beside(l.watchSettled)
	works := []func() error{
		func() error { return l.produce(first("batch", 60)) },
		func() error { return l.copy(first("copy", 60)) },
		func() error { return l.inTransactions(first("tx", 12)) },
		func() error { return l.inSQL(first("sql", 6)) },
		func() error { return l.idempotent(first("once", 12)) },
	}
	for w := range 6 {
		works = append(works, func() error {
			for _, m := range first(fmt.Sprint("single", w), 8) {
				if err := l.produce([]weir.Message{m}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	together(works...)
	l.drained("t", slices.Collect(maps.Keys(groups))...)
}

// produce stores messages in one call.
func (l *cell) produce(list []weir.Message) error {
	l.starting(list)
	for _, m := range list {
		l.rec.Committing(m.Payload.(string))
	}
	stored, err := l.c.Produce(l.ctx, "t", list...)
	if err != nil {
		return fmt.Errorf("by Produce: %w", err)
	}
	return l.stored(list, stored)
}

func (l *cell) starting(list []weir.Message) {
	for _, m := range list {
		l.rec.ProduceStarted("t", m.Payload.(string), m.Key)
	}
}

func (l *cell) stored(list []weir.Message, stored []weir.Produced) error {
	if len(stored) != len(list) {
		return fmt.Errorf("%d messages gave %d results", len(list), len(stored))
	}
	for i, m := range list {
		l.rec.Produced("t", stored[i].ID, m.Payload.(string), m.Key)
	}
	return nil
}

// sequence is the messages as Copy takes them.
func sequence(list []weir.Message) iter.Seq2[weir.Message, error] {
	return func(yield func(weir.Message, error) bool) {
		for _, m := range list {
			if !yield(m, nil) {
				return
			}
		}
	}
}

// copy stores messages by Copy, half of them in a transaction of the caller's.
func (l *cell) copy(list []weir.Message) error {
	l.starting(list)
	half := len(list) / 2
	if n, err := l.c.Copy(l.ctx, "t", sequence(list[:half])); err != nil || n != int64(half) {
		return fmt.Errorf("by Copy: %d stored, %w", n, err)
	}
	err := pgx.BeginFunc(l.ctx, l.pool, func(tx pgx.Tx) error {
		n, err := l.c.CopyTx(l.ctx, tx, "t", sequence(list[half:]))
		if err == nil && n != int64(len(list)-half) {
			err = fmt.Errorf("%d stored", n)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("by CopyTx: %w", err)
	}
	// It gives no ids: they are found by the values.
	conn, err := pgx.Connect(l.ctx, l.admin.Config().ConnString())
	if err != nil {
		return err
	}
	defer conn.Close(l.ctx)
	for _, m := range list {
		var id int64
		if err := conn.QueryRow(l.ctx, "select id from weir.log_1 where payload #>> '{}' = $1", m.Payload).Scan(&id); err != nil {
			return fmt.Errorf("by Copy: it said that it stored %v: %w", m.Payload, err)
		}
		l.rec.Produced("t", id, m.Payload.(string), m.Key)
	}
	return nil
}

// inTransactions stores messages by ProduceTx, every third in a transaction that is rolled back.
func (l *cell) inTransactions(list []weir.Message) error {
	rollback := errors.New("rolled back")
	for i, m := range list {
		one := []weir.Message{m}
		l.starting(one)
		var stored []weir.Produced
		err := pgx.BeginFunc(l.ctx, l.pool, func(tx pgx.Tx) (err error) {
			if stored, err = l.c.ProduceTx(l.ctx, tx, "t", m); err == nil && i%3 == 0 {
				err = rollback
			}
			l.rec.Committing(m.Payload.(string))
			return err
		})
		if errors.Is(err, rollback) {
			l.rec.ProduceFailed(m.Payload.(string))
			continue
		}
		if err != nil {
			return fmt.Errorf("by ProduceTx: %w", err)
		}
		l.c.Wake("t")
		if err := l.stored(one, stored); err != nil {
			return err
		}
	}
	return nil
}

// inSQL stores messages by ProduceSQL, in a transaction of database/sql.
func (l *cell) inSQL(list []weir.Message) error {
	db := stdlib.OpenDBFromPool(l.pool)
	defer func() { _ = db.Close() }()
	l.starting(list)
	tx, err := db.BeginTx(l.ctx, nil)
	if err != nil {
		return err
	}
	stored, err := l.c.ProduceSQL(l.ctx, tx, "t", list...)
	if err != nil {
		return errors.Join(fmt.Errorf("by ProduceSQL: %w", err), tx.Rollback())
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	return l.stored(list, stored)
}

// idempotent stores messages with idempotency keys, each twice.
func (l *cell) idempotent(list []weir.Message) error {
	for i := range list {
		list[i].IdempotencyKey = fmt.Sprintf(`it's "%d" \ %%s`, i)
	}
	l.starting(list)
	stored, err := l.c.Produce(l.ctx, "t", list...)
	if err != nil {
		return fmt.Errorf("with idempotency keys: %w", err)
	}
	if n, err := l.c.Copy(l.ctx, "t", sequence(list)); err != nil || n != 0 {
		return fmt.Errorf("by Copy with idempotency keys of before: %d stored, %w", n, err)
	}
	again, err := l.c.Produce(l.ctx, "t", list...)
	if err != nil {
		return fmt.Errorf("with idempotency keys of before: %w", err)
	}
	for i := range list {
		if stored[i].Duplicate || !again[i].Duplicate || again[i].ID != stored[i].ID {
			return fmt.Errorf("message %d with an idempotency key gave %+v, and then %+v", i, stored[i], again[i])
		}
	}
	return l.stored(list, stored)
}

// consume handles the messages of a group until the end of the cell.
func (l *cell) consume(topic, group string, tx bool) {
	name := "consumer of " + group
	handle := func(m *weir.Received[string]) error {
		l.rec.HandleStarted(group, name, m.ID, m.Value, m.Key, m.Attempt)
		l.mu.Lock()
		defer l.mu.Unlock()
		if strings.HasSuffix(m.Value, "-again") && m.Attempt == 1 || strings.HasSuffix(m.Value, "-dead") && !l.fixed {
			return errors.New("not now")
		}
		l.handled++
		return nil
	}
	h := weir.Handle(func(_ context.Context, m *weir.Received[string]) error {
		err := handle(m)
		l.rec.HandleEnded(group, name, m.ID, err == nil)
		return err
	})
	if tx {
		h = weir.HandleTx(func(ctx context.Context, tx pgx.Tx, m *weir.Received[string]) error {
			err := handle(m)
			if _, sqlErr := tx.Exec(ctx, "insert into handled.effect values ($1, $2)", group, m.ID); sqlErr != nil {
				err = sqlErr
			}
			l.rec.HandleEnded(group, name, m.ID, err == nil)
			return err
		})
	}
	k := got(l.c.NewConsumer(topic, group, h, &weir.ConsumerOptions{Concurrency: 4, PollInterval: 100 * time.Millisecond, Name: name}))
	l.beside(func(ctx context.Context) error {
		if err := k.Run(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	})
}

// watchSettled records the settled head of t again and again.
func (l *cell) watchSettled(ctx context.Context) error {
	for ctx.Err() == nil {
		began := l.rec.Now()
		t, err := l.c.Topic(ctx, "t")
		if err != nil {
			return err
		}
		l.rec.SettledSince(began, "t", t.Settled)
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// drained waits until groups have handled everything that can be handled.
func (l *cell) drained(topic string, names ...string) {
	l.until(fmt.Sprintf("the groups %v of %s are done", names, topic), func() bool {
		for _, g := range got(l.c.Groups(l.ctx, topic)) {
			if slices.Contains(names, g.Name) && (g.Lag != 0 || g.Leases != 0 || g.Retrying != 0 || g.Waiting != 0) {
				return false
			}
		}
		return true
	})
}

// dead demands the dead letters of each group, and gives them another life.
func (l *cell) dead() {
	want := l.number("select count(*) from weir.log_1 where payload #>> '{}' like '%-dead'")
	ensure(want > 0, "no message is to be dead")
	for name := range groups {
		list := got(l.c.DeadLetters(l.ctx, "t", name, 0, 100))
		ensure(int64(len(list)) == want, "group %s has %d dead letters, want %d", name, len(list), want)
		for _, d := range list {
			ensure(d.Attempt == 3 && d.Error == "not now" && len(d.Errors) == 3, "group %s has the dead letter %+v", name, d)
			l.rec.Dead(name, d.ID)
		}
		some := weir.DeadFilter{
			IDs: []int64{list[0].ID}, Key: list[0].Key, KeyPrefix: list[0].Key[:1], Error: "not", MinAttempts: 2,
			ProducedAfter: list[0].ProducedAt.Add(-time.Second), DiedBefore: time.Now().Add(time.Hour),
		}
		found := got(l.c.FindDeadLetters(l.ctx, "t", name, some, 0, 10))
		ensure(len(found) == 1 && found[0].ID == list[0].ID, "the filter found %+v", found)
	}
	l.mu.Lock()
	l.fixed = true
	l.mu.Unlock()
	for name := range groups {
		n := got(l.c.Redrive(l.ctx, "t", name, 0))
		ensure(n == want, "%d dead letters of group %s were redriven, want %d", n, name, want)
	}
	l.drained("t", slices.Collect(maps.Keys(groups))...)
	for _, g := range got(l.c.Groups(l.ctx, "t")) {
		ensure(g.Dead == 0, "group %s has %d dead letters after all were redriven", g.Name, g.Dead)
	}
}

// seek moves the groups with plain handlers back to the beginning. They handle everything again.
func (l *cell) seek() {
	for name := range groups {
		if strings.HasSuffix(name, "-tx") {
			continue
		}
		l.rec.Seek(name, 0)
		was := got(l.c.Seek(l.ctx, "t", name, weir.Beginning()))
		ensure(was == l.number("select max(id) from weir.log_1"), "group %s was at %d", name, was)
		l.rec.Seek(name, 0)
	}
	l.drained("t", slices.Collect(maps.Keys(groups))...)
}

// late has a transaction with a low id commit after one with a higher id. Nothing is handed out past it while it is open.
func (l *cell) late() {
	must(l.c.CreateTopic(l.ctx, "late", nil))
	for _, name := range []string{"late", "probe"} {
		must(l.c.CreateGroup(l.ctx, "late", name, nil))
	}
	l.consume("late", "late", false)
	l.rec.ProduceStarted("late", "low", "")
	l.rec.ProduceStarted("late", "high", "")
	tx := got(l.pool.Begin(l.ctx))
	defer func() { _ = tx.Rollback(context.WithoutCancel(l.ctx)) }()
	low := got(l.c.ProduceTx(l.ctx, tx, "late", weir.Message{Payload: "low"}))[0].ID
	l.rec.Committing("high")
	high := got(l.c.Produce(l.ctx, "late", weir.Message{Payload: "high"}))[0].ID
	l.rec.Produced("late", high, "high", "")
	ensure(low < high, "the ids are %d and %d", low, high)
	for range 5 {
		n := l.number("select count(*) from weir.claim('late', 'probe', 'c')")
		ensure(n == 0, "%d ranges are handed out past an open transaction", n)
		read := got(l.c.Read(l.ctx, "late", 0, 10))
		ensure(len(read) == 0, "%d messages are read past an open transaction", len(read))
	}
	blockers := got(l.c.Blockers(l.ctx, "late"))
	ensure(len(blockers) == 1 && blockers[0].Waiting > 0, "the blockers are %+v", blockers)
	l.rec.Committing("low")
	must(tx.Commit(l.ctx))
	l.rec.Produced("late", low, "low", "")
	l.drained("late", "late")
	claimed := int64(0)
	l.until("both are to be had", func() bool {
		claimed += l.number("select coalesce(sum(high - low), 0)::bigint from weir.claim('late', 'probe', 'c')")
		return claimed == high && len(got(l.c.Read(l.ctx, "late", 0, 10))) == 2
	})
}

// cutter cuts connections when an answer comes.
type cutter struct {
	mu sync.Mutex
	// left is after how many reads the next cut is; 0: none
	left, cuts int
}

func (k *cutter) arm(reads int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.left = reads
}

func (k *cutter) strikes() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.left == 0 {
		return false
	}
	k.left--
	if k.left == 0 {
		k.cuts++
		return true
	}
	return false
}

// cutConn is a connection that it cuts.
type cutConn struct {
	net.Conn
	k *cutter
}

func (c *cutConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == nil && c.k.strikes() {
		_ = c.Conn.Close()
		return 0, io.EOF // what was read is lost
	}
	return n, err
}

// lostAnswers produces while connections are cut, when the answer has come but was not read. Each message is stored once.
func (l *cell) lostAnswers() {
	must(l.c.CreateTopic(l.ctx, "cut", nil))
	k := &cutter{}
	config := l.config()
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &cutConn{conn, k}, nil
	}
	config.MaxConns = 2
	pool := got(pgxpool.NewWithConfig(l.ctx, config))
	defer pool.Close()
	c := got(weir.New(pool, &weir.Options{NoListen: true, NoMaintenance: true, Logger: slog.New(slog.DiscardHandler)}))
	defer c.Close()
	got(c.Produce(l.ctx, "cut", weir.Message{Payload: "warm"}))
	for reads := 1; reads <= 4; reads++ {
		k.arm(reads)
		value := fmt.Sprint("cut-", reads)
		stored, err := c.Produce(l.ctx, "cut", weir.Message{Payload: value})
		k.arm(0)
		must(err)
		n := l.number("select count(*) from "+l.logOf("cut")+" where payload #>> '{}' = $1", value)
		ensure(n == 1, "%d messages are stored after an answer was lost, want 1", n)
		id := l.number("select id from "+l.logOf("cut")+" where payload #>> '{}' = $1", value)
		ensure(stored[0].ID == id, "the message is said to have id %d, and has %d", stored[0].ID, id)
	}
	ensure(k.cuts > 0, "no connection was cut")
}

// logOf is the table of a topic's log.
func (l *cell) logOf(topic string) string {
	return fmt.Sprintf("weir.log_%d", l.number("select id from weir.topic where name = $1", topic))
}

// formats stores payloads, keys and headers that are hard to quote or encode, in topics of each format, and compares what is handled.
func (l *cell) formats() {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	large := strings.Repeat(`x'"\`, 25_000)
	payloads := map[weir.Format][]any{
		weir.JSON: {
			json.RawMessage(`{"b": 1.50,  "a": [null, true, "日本 \" \\ \u0001 ' $1 %s"], "a": 2}`), large, nil, 12345678901234567,
		},
		weir.JSONB: {json.RawMessage(`{"a": [null, true, "日本 \" \\ ' $1 %s 🦫"]}`), large, "", 1.5},
		weir.Bytes: {every, []byte(large), []byte{0}, []byte(`\x00`)},
	}
	headers := map[string]string{`it's "h"`: `\ %s $1 '; select 1; --`, "é": "🦫", "empty": ""}
	for format, values := range payloads {
		topic := "format-" + string(format)
		must(l.c.CreateTopic(l.ctx, topic, &weir.TopicOptions{Format: format}))
		must(l.c.CreateGroup(l.ctx, topic, "g", &weir.GroupOptions{Mode: weir.Queue}))
		want := map[string][]byte{}
		var list []weir.Message
		for i := range 3 * len(values) {
			m := weir.Message{
				Key: fmt.Sprintf(`k %d '"\$1%%s é`, i), Headers: headers, Payload: values[i%len(values)],
				Priority: i%21 - 10, Timeout: time.Minute,
			}
			switch i % 3 {
			case 1:
				m.Delay = 30 * time.Millisecond
			case 2:
				m.DeliverAt = time.Now().Add(-time.Hour)
			}
			raw, ok := m.Payload.([]byte)
			if !ok {
				raw = got(json.Marshal(m.Payload))
				if text, is := m.Payload.(json.RawMessage); is {
					raw = text
				}
			}
			want[m.Key] = raw
			list = append(list, m)
		}
		var mu sync.Mutex
		seen := map[string]*weir.Received[[]byte]{}
		times := 0
		k := got(l.c.NewConsumer(topic, "g", weir.Handle(func(_ context.Context, m *weir.Received[[]byte]) error {
			mu.Lock()
			defer mu.Unlock()
			seen[m.Key] = m
			times++
			return nil
		}), &weir.ConsumerOptions{PollInterval: 100 * time.Millisecond}))
		l.beside(k.Run)
		third := len(list) / 3
		got(l.c.Produce(l.ctx, topic, list[:third]...))
		got(l.c.Copy(l.ctx, topic, sequence(list[third:2*third])))
		must(pgx.BeginFunc(l.ctx, l.pool, func(tx pgx.Tx) error {
			_, err := l.c.ProduceTx(l.ctx, tx, topic, list[2*third:]...)
			return err
		}))
		l.drained(topic, "g")
		mu.Lock()
		ensure(times == len(list) && len(seen) == len(list), "%s: %d messages were handled %d times, want %d once", topic, len(seen), times, len(list))
		for key, m := range seen {
			same := bytes.Equal(m.Raw, want[key])
			if format == weir.JSONB {
				var a, b any
				must(json.Unmarshal(m.Raw, &a))
				must(json.Unmarshal(want[key], &b))
				same = reflect.DeepEqual(a, b)
			}
			ensure(same, "%s: %q came back as %.200q, it was %.200q", topic, key, m.Raw, want[key])
			ensure(maps.Equal(m.Headers, headers), "%s: the headers came back as %q", topic, m.Headers)
		}
		l.handled += times
		mu.Unlock()
	}
}

// upkeep does maintenance until a condition holds.
func (l *cell) upkeep(what string, holds func() bool) {
	l.until(what, func() bool {
		if holds() {
			return true
		}
		_, _, err := l.c.Maintain(l.ctx)
		must(err)
		return false
	})
}

// storage has retention and compaction remove what they may, and nothing else.
func (l *cell) storage() {
	const messages = 2300
	must(l.c.CreateTopic(l.ctx, "kept", &weir.TopicOptions{SegmentSize: 1000, RetentionBytes: 1}))
	must(l.c.CreateGroup(l.ctx, "kept", "g", nil))
	must(l.c.CreateTopic(l.ctx, "compact", &weir.TopicOptions{SegmentSize: 1000, Compact: true}))
	kept, compact := l.logOf("kept"), l.logOf("compact")
	list := make([]weir.Message, messages)
	for i := range list {
		list[i] = weir.Message{Key: fmt.Sprint("k", i%10), Payload: i}
	}
	got(l.c.Copy(l.ctx, "kept", sequence(list)))
	got(l.c.Copy(l.ctx, "compact", sequence(list)))
	got(l.c.Produce(l.ctx, "compact", weir.Message{Key: "k0", Tombstone: true}))

	l.upkeep("two segments of kept are full", func() bool {
		return l.number("select count(*) from weir.segment as s join weir.topic as t on t.id = s.topic_id where t.name = 'kept' and s.sealed_at is not null") == 2
	})
	for range 10 {
		_, _, err := l.c.Maintain(l.ctx)
		must(err)
	}
	n := l.number("select count(*) from " + kept)
	ensure(n == messages, "retention left %d messages of %d, although the group has yet to handle them", n, messages)
	var mu sync.Mutex
	seen := map[int]int{}
	k := got(l.c.NewConsumer("kept", "g", weir.HandleBatch(func(_ context.Context, batch []*weir.Received[int]) error {
		mu.Lock()
		defer mu.Unlock()
		for _, m := range batch {
			seen[m.Value]++
		}
		return nil
	}), &weir.ConsumerOptions{BatchSize: 500, Prefetch: 2000, PollInterval: 100 * time.Millisecond}))
	l.beside(k.Run)
	l.drained("kept", "g")
	mu.Lock()
	for i := range messages {
		ensure(seen[i] == 1, "message %d was handled %d times", i, seen[i])
	}
	mu.Unlock()
	l.handled += messages
	l.upkeep("retention removes what the group has handled", func() bool {
		return l.number("select count(*) from "+kept) == messages-2000 &&
			l.number("select count(*) from pg_inherits where inhparent = $1::text::regclass and inhrelid::regclass::text in ($1 || '_1', $1 || '_2')", kept) == 0
	})

	l.upkeep("compaction removes what later messages replace", func() bool {
		return l.number("select count(*) from "+compact) <= messages+1-2000+10
	})
	for i := range 10 {
		m, found, err := l.c.Current(l.ctx, "compact", fmt.Sprint("k", i))
		must(err)
		ensure(found == (i > 0), "the latest message of k%d: found is %v", i, found)
		ensure(i == 0 || string(m.Raw) == fmt.Sprint(messages-10+i), "the latest message of k%d is %q", i, m.Raw)
	}
	n = got(l.c.DeleteKey(l.ctx, "compact", "k1", nil))
	ensure(n > 0 && l.number("select count(*) from "+compact+" where key = 'k1'") == 0, "%d messages of a key were deleted", n)
}

// calls makes each other call of the library: all of them have arguments of their own to send.
func (l *cell) calls() {
	c, ctx := l.c, l.ctx
	must(c.CreateTopic(ctx, "a", &weir.TopicOptions{RetentionAge: time.Hour, TombstoneTTL: time.Hour, IdempotencyTTL: time.Minute}))
	must(c.RenameTopic(ctx, "a", "b"))
	size, age := int64(5000), 2*time.Hour
	must(c.AlterTopic(ctx, "b", weir.TopicChange{SegmentSize: &size, RetentionAge: &age}))
	t := got(c.Topic(ctx, "b"))
	ensure(t.RetentionAge == age && t.SegmentSize == size, "the topic is %+v", t)
	ids := got(c.Produce(ctx, "b", weir.Message{Payload: 1, Key: "k"}, weir.Message{Payload: 2}, weir.Message{Payload: 3}))
	l.until("they are settled", func() bool { return len(got(c.Read(ctx, "b", 0, 10))) == 3 })
	must(c.CreateGroup(ctx, "b", "g", &weir.GroupOptions{Mode: weir.Ordered, Start: weir.AtTime(time.Now().Add(-time.Hour)), KeyPrefix: "k", Headers: map[string]string{"a": "b"}}))
	must(c.RenameGroup(ctx, "b", "g", "h"))
	ensure(got(c.PauseGroup(ctx, "b", "h")), "the group was paused")
	prefix, none := "", map[string]string{}
	must(c.AlterGroup(ctx, "b", "h", weir.GroupChange{Shards: 8, KeyPrefix: &prefix, Headers: &none, MaxAttempts: 5, RetryDelay: time.Second}))
	ensure(got(c.ResumeGroup(ctx, "b", "h")), "the group was not paused")
	got(c.Seek(ctx, "b", "h", weir.AtID(ids[1].ID)))
	got(c.Seek(ctx, "b", "h", weir.Head()))
	got(c.Seek(ctx, "b", "h", weir.AtTime(time.Now().Add(-time.Hour))))
	g := got(c.Group(ctx, "b", "h"))
	ensure(g.Shards == 8 && g.MaxAttempts == 5 && g.Claimed == 0, "the group is %+v", g)
	for _, p := range []weir.Position{weir.Beginning(), weir.Head(), weir.AtID(2), weir.AtTime(time.Now())} {
		got(c.After(ctx, "b", p))
	}
	topics := got(c.Topics(ctx))
	consumers := got(c.Consumers(ctx, "t", ""))
	ensure(len(topics) > 5 && len(consumers) == len(groups), "there are %d topics, and %d consumers of t", len(topics), len(consumers))
	ensure(got(c.SuspendMaintenance(ctx, true)), "maintenance was suspended")
	ensure(got(c.MaintenanceSuspended(ctx)) != nil, "maintenance is not suspended")
	got(c.SuspendMaintenance(ctx, false))
	got(c.PurgeMany(ctx, "b", "h", weir.DeadFilter{Headers: map[string]string{"a": "b"}}, nil))
	ensure(got(c.DropGroup(ctx, "b", "h", nil)), "there was no group")
	ensure(got(c.DropTopic(ctx, "b", nil)), "there was no topic")
	_, err := c.Produce(ctx, "b", weir.Message{Payload: 1})
	ensure(errors.Is(err, weir.ErrTopicNotFound), "a dropped topic: %v", err)
	_, err = c.Produce(ctx, "t", weir.Message{Payload: json.RawMessage("{")})
	ensure(errors.Is(err, weir.ErrFormat), "a payload that is no JSON: %v", err)
}

// judge compares what was produced with what was handled.
func (l *cell) judge() {
	rows := got(l.admin.Query(l.ctx, "select grp, id from handled.effect"))
	var grp string
	var id int64
	got(pgx.ForEachRow(rows, []any{&grp, &id}, func() error {
		l.rec.Effect(grp, id)
		return nil
	}))
	o := history.Options{
		Groups: []string{"late"}, OrderedGroups: []string{"ordered", "ordered-tx"}, NoRedelivery: true, Topics: map[string]string{"late": "late"},
	}
	for name := range groups {
		o.Groups = append(o.Groups, name)
		o.Topics[name] = "t"
		if strings.HasSuffix(name, "-tx") {
			o.EffectOnceGroups = append(o.EffectOnceGroups, name)
		}
	}
	report := history.Judge(l.rec.Events(), o)
	ensure(report.OK(), "%s\n%v", report, report.Violations)
	ensure(report.Produced == int(l.number("select count(*) from weir.log_1"))+2, "%d messages were produced, the log has others: %s", report.Produced, report)
}

// check runs the invariants, through the way that is tried. A guest may not.
func (l *cell) check() {
	if l.Guest {
		return
	}
	for _, r := range got(l.c.Check(l.ctx)) {
		ensure(len(r.Violations) == 0, "%s (%s): %v", r.Name, r.Holds, r.Violations)
	}
}
