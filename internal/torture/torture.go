// Package torture shows what Weir survives: producers and consumers of every mode, in processes of their own, an injector of
// faults, and a judge that knows what was committed from a ledger which each produce writes in its own transaction.
//
// What every process does it puts on record in a file of its own before it goes on, so that the record survives the process.
// Messages carry the era they were made in, and so do their keys: eras are judged one after the other, and a run of any length
// takes the memory of one.
package torture

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/sql"
)

// Options are the options of Run.
type Options struct {
	// DSN is the database to run on, which has Weir in it; "" starts a private server.
	DSN string
	// Schema is the one that Weir is installed in. Default "weir".
	Schema string
	// For is how long messages are produced and faults are made, at least 1 s. Default 1 min.
	For time.Duration
	// Rate is how many messages a second are aimed at, at least 1. Groups that fall behind slow it down. Default 6,000.
	Rate int
	// Seed decides on faults, their victims and lengths, and what transactions are like. Default: a random one.
	Seed uint64
	// Faults are the kinds to make. Default: all that the server and the machine allow.
	Faults []string
	// Kinds has the run go on, for ten times For at most, until faults of so many kinds were made.
	Kinds int
	// Pace shortens the pauses between faults by so much. Default 1.
	Pace float64
	// Break names a bug to seed into the installed functions; a private server only.
	Break string
	// Yes accepts a database that others use, or that has no Weir.
	Yes bool
	// Drain is how long the groups may take to handle everything once the faults are over. Default 3 min, with Break 30 s.
	Drain time.Duration
	// Out receives a line of progress now and then; a terminal has it rewritten in place with Live.
	Out  io.Writer
	Live bool
	// Child makes the command of a process, which calls Child.
	Child func() (*exec.Cmd, error)
	// Keep leaves the record of the processes in its folder.
	Keep bool
}

// ErrRefused is matched by errors about what was asked for. Nothing was touched.
var ErrRefused = errors.New("refused")

type refusal struct{ text string }

func (r *refusal) Error() string        { return r.text }
func (r *refusal) Is(target error) bool { return target == ErrRefused }

func refuse(format string, args ...any) error { return &refusal{fmt.Sprintf(format, args...)} }

func (o *Options) complete() error {
	if o.Schema == "" || o.Break != "" { // bugs are written for the default
		o.Schema = sql.DefaultSchema
	}
	if o.For == 0 {
		o.For = time.Minute
	}
	if o.Rate == 0 {
		o.Rate = 6000
	}
	if o.Drain == 0 {
		o.Drain = 3 * time.Minute
		if o.Break != "" {
			o.Drain = 30 * time.Second // what is stuck stays stuck
		}
	}
	for o.Seed == 0 {
		var b [8]byte
		_, _ = rand.Read(b[:]) // never fails
		o.Seed = binary.NativeEndian.Uint64(b[:]) % 1_000_000
	}
	if o.Pace == 0 {
		o.Pace = 1
	}
	if o.Out == nil {
		o.Out = io.Discard
	}
	switch {
	case o.For < time.Second:
		return refuse("the time is %v: it must be at least 1s", o.For)
	case o.Rate < 1 || o.Rate > 1_000_000:
		return refuse("the rate is %d: it must be from 1 to 1000000 messages a second", o.Rate)
	case o.Break != "" && o.DSN != "":
		return refuse("a bug is seeded into a private server only: leave the database out")
	case o.Break != "" && !slices.Contains(BugNames(), o.Break):
		return refuse("there is no bug %q: the bugs are %s", o.Break, strings.Join(BugNames(), ", "))
	}
	return checkFaults(o.Faults)
}

// torture is one run.
type torture struct {
	o      Options
	server *pgtest.Server // nil: another's
	dsn    string
	folder string
	base   int64 // of all clocks, in microseconds
	// offset is what the server's clock lacks to the one of this machine, in microseconds; 0 for a private server
	offset int64
	blur   time.Duration // how much more or less it may be
	era    time.Duration

	owns        bool
	maxPrepared int
	noDisks     string // why the disks cannot be filled
	small, wal  string // small file systems
	active      map[string]bool

	pool  *pgxpool.Pool
	c     *weir.Client
	rec   *recorder
	seq   atomic.Int64
	procs atomic.Int64
	slots []*slot
	tasks sync.WaitGroup
	undo  []func(ctx context.Context) error

	// observing is held by whoever looks at settled heads, alone by whoever crashes the server.
	observing sync.RWMutex
	target    atomic.Int64 // messages a second

	mu       sync.Mutex
	happened []happened
	crashes  []crash
	heads    []head
	samples  []sample
	oddities []string
	failures map[string]string // of faults
}

// head is a settled head as it was seen.
type head struct {
	began, at int64
	topic     int
	settled   int64
}

// crash is a time within which the server crashed and came up again.
type crash struct{ began, up int64 }

// sample is what was seen of the groups and processes at one moment.
type sample struct {
	at                int64
	heads             [3]int64
	lag, committed    [6]int64
	produced, handled int64
}

func (t *torture) nextProc() int64 { return t.procs.Add(1) }

func (t *torture) rate() float64 { return float64(t.target.Load()) / producers }

const producers = 2

// patience is how long a process that was asked to stop may take; it decides nothing but how long a failure takes.
const patience = time.Minute

// odd notes what no fault explains.
func (t *torture) odd(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.oddities) < 100 {
		t.oddities = append(t.oddities, fmt.Sprintf(format, args...))
	}
}

func (t *torture) failedFault(kind string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failures[kind] = err.Error()
}

func code(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// Run runs a torture, until its time is over or ctx ends, heals, waits and judges. It leaves nothing behind. An error means that
// there is no verdict; one that matches ErrRefused, that nothing was touched.
func Run(ctx context.Context, o Options) (r *Report, err error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	t := &torture{o: o, active: map[string]bool{}, failures: map[string]string{}}
	t.target.Store(int64(o.Rate))
	// An era of some 50,000 messages is judged at a time.
	t.era = max(time.Second, time.Duration(50_000/float64(o.Rate)*float64(time.Second)))
	defer func() {
		for i := len(t.undo) - 1; i >= 0; i-- {
			err = errors.Join(err, within(time.Minute, t.undo[i]))
		}
	}()
	if err := t.prepare(ctx); err != nil {
		return nil, err
	}
	return t.run(ctx)
}

func (t *torture) later(f func(ctx context.Context) error) { t.undo = append(t.undo, f) }

func (t *torture) prepare(ctx context.Context) (err error) {
	if t.o.DSN == "" {
		if err := t.startServer(ctx); err != nil {
			return err
		}
	} else {
		t.dsn, t.noDisks = t.o.DSN, "needs a private server"
	}
	config, err := pgxpool.ParseConfig(t.dsn)
	if err != nil {
		return refuse("dsn: %v", err)
	}
	config.MaxConns = 12
	config.ConnConfig.RuntimeParams["application_name"] = "weir torture"
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "local"
	if t.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return refuse("dsn: %v", err)
	}
	t.later(func(context.Context) error { t.pool.Close(); return nil })
	if t.c, err = weir.New(t.pool, &weir.Options{
		Schema: t.o.Schema, Logger: slog.New(slog.DiscardHandler), NoListen: true, NoMaintenance: true,
	}); err != nil {
		return refuse("%v", err)
	}
	t.later(func(context.Context) error { t.c.Close(); return nil })
	if t.server != nil {
		if err := t.c.Migrate(ctx); err != nil {
			return err
		}
	} else if err := t.inspect(ctx); err != nil {
		return err
	}
	var now int64
	var foreign bool
	asked := time.Now()
	if err := t.pool.QueryRow(ctx, text(t.o.Schema, "may")).Scan(&t.owns, &t.maxPrepared, &now, &foreign); err != nil {
		return err
	}
	if t.server == nil {
		trip := time.Since(asked)
		t.offset, t.blur = asked.Add(trip/2).UnixMicro()-now, trip/2
	}
	if foreign {
		return refuse("the database has a schema weir_torture that no torture made: it would be dropped")
	}
	if err := t.choose(); err != nil {
		return err
	}

	// From here on the database is changed.
	if t.server == nil && t.o.Yes {
		if err := t.c.Migrate(ctx); err != nil {
			return err
		}
	}
	if err := t.clear(ctx); err != nil {
		return err
	}
	t.later(t.clear)
	if t.o.Break != "" {
		broken, err := breakIt(t.o.Break)
		if err != nil {
			return err
		}
		for _, text := range broken {
			if err := t.execute(ctx, text); err != nil {
				return fmt.Errorf("bug %s: %w", t.o.Break, err)
			}
		}
	}
	if err := t.execute(ctx, "set local default_tablespace = ''; "+text(t.o.Schema, "create")); err != nil {
		return err
	}
	for _, spec := range topics {
		// Retention removes what all groups have handled, as fast as it can.
		size := int64(1000)
		if spec.mode == weir.Stream {
			size = 20_000
		}
		if err := t.c.CreateTopic(ctx, spec.name, &weir.TopicOptions{SegmentSize: size, RetentionAge: time.Second}); err != nil {
			return err
		}
	}
	for _, g := range groups {
		if err := t.c.CreateGroup(ctx, topics[g.topic].name, g.name, &weir.GroupOptions{
			Mode: topics[g.topic].mode, MaxAttempts: 1000, RetryDelay: 50 * time.Millisecond, RetryMax: time.Second, SplitAfter: 3,
		}); err != nil {
			return err
		}
	}
	if t.folder, err = os.MkdirTemp("", "weir-torture-"); err != nil {
		return err
	}
	t.later(func(context.Context) error {
		if t.o.Keep {
			return nil
		}
		return os.RemoveAll(t.folder)
	})
	t.base = time.Now().UnixMicro()
	t.rec, err = newRecorder(recordPath(t.folder, 0), t.base, 0)
	return err
}

// execute runs statements in one transaction.
func (t *torture) execute(ctx context.Context, statements string) error {
	return pgx.BeginFunc(ctx, t.pool, func(tx pgx.Tx) error {
		_, err := tx.Conn().PgConn().Exec(ctx, statements).ReadAll()
		return err
	})
}

// startServer starts a private server; where that is to be had, with logs and WAL on small file systems.
func (t *torture) startServer(ctx context.Context) error {
	o := &pgtest.Options{Fast: true, Settings: map[string]string{
		"max_wal_size": "256MB", "min_wal_size": "80MB", "checkpoint_timeout": "60s", "shared_buffers": "256MB",
		"log_min_messages": "panic", "log_min_error_statement": "panic",
	}}
	t.noDisks = "needs root, and mounting"
	base := ""
	if os.Geteuid() == 0 && (len(t.o.Faults) == 0 || slices.ContainsFunc(t.o.Faults, func(f string) bool { return strings.HasPrefix(f, "disk-") })) {
		folder, err := os.MkdirTemp("", "weir-torture-pg-")
		if err == nil {
			err = os.Chmod(folder, 0o755)
		}
		if err != nil {
			return err
		}
		t.later(func(context.Context) error { return os.RemoveAll(folder) })
		small, wal := filepath.Join(folder, "small"), filepath.Join(folder, "wal")
		for path, size := range map[string]int64{small: 1 << 30, wal: 768 << 20} {
			if err = mountSmall(path, size); err != nil {
				t.noDisks = err.Error()
				break
			}
			t.later(func(context.Context) error { return unmountSmall(path) })
		}
		if err == nil {
			base, t.noDisks, t.small, t.wal = folder, "", small, wal
			o.DataDir = filepath.Join(folder, "data")
		}
	}
	s, err := pgtest.Start(ctx, o)
	if err != nil {
		return err
	}
	t.server = s
	t.later(s.Stop)
	if base != "" {
		if err := t.moveWAL(ctx); err != nil {
			return err
		}
	}
	if err := s.CreateDatabase(ctx, "torture"); err != nil {
		return err
	}
	if base != "" {
		inside := filepath.Join(t.small, "space")
		if err := t.own(inside); err != nil {
			return err
		}
		if err := s.Exec(ctx, "postgres", "create tablespace torture_small location '"+inside+"'"); err != nil {
			return err
		}
		if err := s.Exec(ctx, "torture", text("", "tablespace")); err != nil {
			return err
		}
	}
	t.dsn = s.DSN("torture")
	return nil
}

// own makes a folder that belongs to the server's user.
func (t *torture) own(path string) error {
	uid, gid, err := ownerOf(t.server.DataDir())
	if err != nil {
		return err
	}
	return errors.Join(os.Mkdir(path, 0o700), os.Chown(path, uid, gid))
}

// moveWAL moves the server's WAL to its small file system.
func (t *torture) moveWAL(ctx context.Context) error {
	s := t.server
	if err := s.Stop(ctx); err != nil {
		return err
	}
	from, to := filepath.Join(s.DataDir(), "pg_wal"), filepath.Join(t.wal, "pg_wal")
	uid, gid, err := ownerOf(s.DataDir())
	if err != nil {
		return err
	}
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		return err
	}
	if err := filepath.Walk(to, func(path string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		mode := os.FileMode(0o600)
		if info.IsDir() {
			mode = 0o700
		}
		return errors.Join(os.Chown(path, uid, gid), os.Chmod(path, mode))
	}); err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(from), os.Symlink(to, from)); err != nil {
		return err
	}
	return s.StartAgain(ctx)
}

// inspect refuses a database that is not for a torture. It only reads.
func (t *torture) inspect(ctx context.Context) error {
	conn, err := t.pool.Acquire(ctx)
	if err != nil {
		return refuse("the server cannot be reached: %v", err)
	}
	version := conn.Conn().PgConn().ParameterStatus("server_version")
	conn.Release()
	var major int
	if _, err := fmt.Sscanf(version, "%d", &major); err == nil && major < 14 {
		return refuse("%v: it is PostgreSQL %s, Weir needs 14 or later", weir.ErrServer, version)
	}
	list, err := t.c.Topics(ctx)
	switch {
	case errors.Is(err, weir.ErrSchemaMissing) && t.o.Yes:
	case errors.Is(err, weir.ErrSchemaMissing):
		return refuse("%v; a torture on a database that is not Weir's needs --yes, which installs it", err)
	case errors.Is(err, weir.ErrServer), errors.Is(err, weir.ErrSchemaOld), errors.Is(err, weir.ErrSchemaNew), errors.Is(err, weir.ErrInvalid):
		return refuse("%v", err)
	case err != nil:
		return err
	}
	if t.o.Yes {
		return nil
	}
	for _, topic := range list {
		if !strings.HasPrefix(topic.Name, "weir_torture_") {
			return refuse("the database has topic %q, which no torture made: name another, or say --yes", topic.Name)
		}
	}
	var others int
	if err := t.pool.QueryRow(ctx, text(t.o.Schema, "others")).Scan(&others); err != nil {
		return err
	}
	if others > 0 {
		return refuse("the database is in use by %d other sessions: name another, or say --yes", others)
	}
	return nil
}

// choose decides which kinds of faults there will be.
func (t *torture) choose() error {
	for _, k := range kinds {
		if len(t.o.Faults) > 0 && !slices.Contains(t.o.Faults, k.name) {
			continue
		}
		lacks := ""
		if k.lacks != nil {
			lacks = k.lacks(t)
		}
		if lacks != "" && len(t.o.Faults) > 0 {
			return refuse("fault %s is not to be had here: it %s", k.name, lacks)
		}
		t.active[k.name] = lacks == ""
	}
	return nil
}

// unavailable are the kinds that this run cannot have, with why.
func (t *torture) unavailable() map[string]string {
	list := map[string]string{}
	for _, k := range kinds {
		if k.lacks != nil && len(t.o.Faults) == 0 { // one that was asked for is there, or refused
			if why := k.lacks(t); why != "" {
				list[k.name] = why
			}
		}
	}
	return list
}

// clear removes what a torture makes in the database, this one or one before it.
func (t *torture) clear(ctx context.Context) error {
	if t.server != nil && len(t.slots) > 0 {
		return nil // it goes as a whole
	}
	if err := t.rollBackPrepared(ctx); err != nil {
		return err
	}
	list, err := t.c.Topics(ctx)
	if err != nil {
		return err
	}
	for _, topic := range list {
		if strings.HasPrefix(topic.Name, "weir_torture_") {
			if _, err := t.c.DropTopic(ctx, topic.Name, &weir.DropOptions{Force: true}); err != nil {
				return err
			}
		}
	}
	return t.execute(ctx, text(t.o.Schema, "drop"))
}

func (t *torture) rollBackPrepared(ctx context.Context) error {
	rows, err := t.pool.Query(ctx, text(t.o.Schema, "prepared"))
	if err != nil {
		return err
	}
	gids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, gid := range gids {
		_, e := t.pool.Exec(ctx, "rollback prepared '"+strings.ReplaceAll(gid, "'", "''")+"'")
		err = errors.Join(err, e)
	}
	return err
}

// run is the run itself.
func (t *torture) run(ctx context.Context) (*Report, error) {
	for range producers {
		t.slots = append(t.slots, &slot{t: t, group: -1})
	}
	for g := range groups {
		t.slots = append(t.slots, &slot{t: t, group: g}, &slot{t: t, group: g})
	}
	network, err := pgx.ParseConfig(t.dsn)
	if err != nil {
		return nil, err
	}
	kind, address := pgconn.NetworkAddress(network.Host, network.Port)
	var running sync.WaitGroup
	defer func() {
		for _, s := range t.slots {
			s.stop(patience)
		}
		running.Wait()
		for _, s := range t.slots {
			if s.proxy != nil {
				s.proxy.close()
			}
		}
		t.tasks.Wait()
	}()
	for i, s := range t.slots {
		if i%2 == 0 {
			if s.proxy, err = newProxy(func() (net.Conn, error) { return net.DialTimeout(kind, address, 5*time.Second) }); err != nil {
				return nil, err
			}
		}
	}
	for i, s := range t.slots {
		rng := mathrand.New(mathrand.NewPCG(t.o.Seed, uint64(i)))
		running.Go(func() { s.run(rng) })
	}
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	observing, stopObserving := context.WithCancel(life)
	defer stopObserving()
	var observed sync.WaitGroup
	observed.Go(func() { t.observe(observing) })
	maintaining, stopMaintaining := context.WithCancel(life)
	defer stopMaintaining()
	var maintained sync.WaitGroup
	maintained.Go(func() { t.maintain(maintaining) })
	show := newProgress(t)
	t.tasks.Go(func() { show.run(life) })

	began := time.Now()
	time.Sleep(min(time.Second, t.o.For/5)) // until it is under way
	torturing, cancel := context.WithTimeout(ctx, 10*t.o.For)
	defer cancel()
	var tormenting sync.WaitGroup
	for l := range lanes {
		tormenting.Go(func() { t.torment(torturing, l) })
	}
	pause(torturing, t.o.For-time.Since(began))
	for torturing.Err() == nil && t.kindsMade() < t.o.Kinds {
		pause(torturing, 50*time.Millisecond)
	}
	cancel()
	tormenting.Wait()
	tortured := time.Since(began)

	show.phase("healing")
	if err := t.heal(); err != nil {
		return nil, err
	}
	for _, s := range t.slots[:producers] {
		s.stop(patience)
	}
	produced := t.rec.now()
	show.phase("draining")
	drained := t.drain(ctx)
	took := time.Duration(t.rec.now()-produced) * time.Microsecond
	var stopping sync.WaitGroup
	for _, s := range t.slots {
		stopping.Go(func() { s.stop(patience) })
	}
	stopping.Wait()
	running.Wait()
	stopMaintaining()
	maintained.Wait()
	stopObserving()
	observed.Wait()
	show.phase("judging")
	r, err := t.judge(context.WithoutCancel(ctx), drained)
	if err != nil {
		return nil, fmt.Errorf("no verdict: %w", err)
	}
	r.Seconds, r.DrainSeconds, r.EndedEarly = seconds(tortured), seconds(took), ctx.Err() != nil
	end()
	show.done()
	return r, nil
}

// kindsMade is how many kinds of faults there were so far.
func (t *torture) kindsMade() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	made := map[string]bool{}
	for _, h := range t.happened {
		made[h.Kind] = true
	}
	return len(made)
}

// heal takes back whatever a fault may have left.
func (t *torture) heal() error {
	var statements []string
	if t.active["frozen-commit"] {
		statements = append(statements, text("", "thaw"), text("", "reload"))
	}
	if t.active["isolation"] {
		statements = append(statements, text("", "isolation_reset"))
	}
	if err := t.order(statements...); err != nil {
		return fmt.Errorf("heal: %w", err)
	}
	for _, g := range groups {
		if err := insist(func(ctx context.Context) error {
			_, err := t.c.ResumeGroup(ctx, topics[g.topic].name, g.name)
			return err
		}); err != nil {
			return fmt.Errorf("heal: %w", err)
		}
	}
	return insist(t.rollBackPrepared)
}

// drain waits until nothing is left to handle.
func (t *torture) drain(ctx context.Context) bool {
	for until := time.Now().Add(t.o.Drain); time.Now().Before(until) && ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		left := int64(-1)
		err := within(10*time.Second, func(ctx context.Context) error {
			_, n, err := t.lags(ctx)
			left = n
			return err
		})
		if err == nil && left == 0 {
			return true
		}
	}
	return false
}

func topicNames() (names []string) {
	for _, spec := range topics {
		names = append(names, spec.name)
	}
	return names
}

// lags looks at the groups; left is what they have to do yet.
func (t *torture) lags(ctx context.Context) (s sample, left int64, err error) {
	rows, err := t.pool.Query(ctx, text(t.o.Schema, "lags"), topicNames())
	if err != nil {
		return s, 0, err
	}
	defer rows.Close()
	n := 0
	for rows.Next() {
		var name string
		var lag, committed, held int64
		if err := rows.Scan(&name, &lag, &committed, &held); err != nil {
			return s, 0, err
		}
		if g := slices.IndexFunc(groups, func(g groupSpec) bool { return g.name == name }); g >= 0 {
			s.lag[g], s.committed[g] = lag, committed
			s.heads[groups[g].topic] = max(s.heads[groups[g].topic], committed+lag)
			left += lag + held
			n++
		}
	}
	if err := rows.Err(); err != nil {
		return s, 0, err
	}
	if n != len(groups) {
		return s, 0, fmt.Errorf("there are %d groups of %d", n, len(groups))
	}
	return s, left, nil
}

// observe looks at settled heads and groups until ctx ends, and slows the producers down where groups fall behind.
func (t *torture) observe(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		t.look(ctx)
		if n%4 == 0 {
			call, cancel := context.WithTimeout(ctx, 5*time.Second)
			s, _, err := t.lags(call)
			cancel()
			s.at = t.rec.now()
			for _, slot := range t.slots {
				sum := slot.sum()
				s.produced += sum.Produced
				s.handled += sum.Handled
			}
			if err == nil {
				t.mu.Lock()
				t.samples = append(t.samples, s)
				t.mu.Unlock()
				t.steer(slices.Max(s.lag[:]))
			}
		}
		pause(ctx, 125*time.Millisecond)
	}
}

// steer sets the rate of the producers by the longest lag.
func (t *torture) steer(lag int64) {
	rate := int64(t.o.Rate)
	most := 20 * rate
	switch {
	case lag > 4*most:
		rate /= 20
	case lag > 2*most:
		rate /= 4
	case lag > most:
		rate = rate * 7 / 10
	}
	if t.target.Swap(rate) == rate {
		return
	}
	for _, s := range t.slots[:producers] {
		s.say("rate %d", rate/producers)
	}
}

// look sees the settled heads once.
func (t *torture) look(ctx context.Context) {
	if !t.observing.TryRLock() {
		return
	}
	defer t.observing.RUnlock()
	call, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	began := t.rec.now()
	rows, err := t.pool.Query(call, text(t.o.Schema, "settled"), topicNames())
	if err != nil {
		return
	}
	var seen []head
	var name string
	var settled, drawn int64
	if _, err := pgx.ForEachRow(rows, []any{&name, &settled, &drawn}, func() error {
		seen = append(seen, head{began: began, topic: slices.IndexFunc(topics, func(s topicSpec) bool { return s.name == name }), settled: settled})
		return nil
	}); err != nil {
		return
	}
	at := t.rec.now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range seen {
		h.at = at
		t.heads = append(t.heads, h)
	}
}

// maintain does the upkeep that every client would do now and then, all the time.
func (t *torture) maintain(ctx context.Context) {
	for ctx.Err() == nil {
		call, cancel := context.WithTimeout(ctx, 20*time.Second)
		done, any, err := t.c.Maintain(call)
		cancel()
		if err != nil || !any || done.Action == "postponed" {
			pause(ctx, 100*time.Millisecond)
		}
	}
}

func seconds(d time.Duration) float64 {
	return float64(d.Round(time.Millisecond).Milliseconds()) / 1000
}
