package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

// lane is a sequence of faults, of which one is at work at a time; the lanes are at work side by side.
type lane int

const (
	laneServer lane = iota
	laneProcess
	laneNetwork
	laneSQL
	lanes
)

// gaps are the mean times between the end of a lane's fault and the next.
var gaps = [lanes]time.Duration{4 * time.Second, 2500 * time.Millisecond, 1500 * time.Millisecond, 2500 * time.Millisecond}

// kind is a kind of fault.
type kind struct {
	name, what string
	lane       lane
	weight     int
	// lacks says why this run cannot have it, "" where it can.
	lacks func(t *torture) string
	// do makes the fault and ends it. It tells what it did to whom, and which groups it concerns, nil for all. errNothing: there was
	// nothing to do it to.
	do func(ctx context.Context, t *torture, rng *rand.Rand) (detail string, concerns []int, err error)
}

var errNothing = errors.New("there is nothing to do it to")

var kinds = []kind{
	{"backend", "SIGKILL of a backend; the server ends all others and recovers", laneServer, 2, ownServer, killBackend},
	{"postmaster", "SIGKILL of the postmaster and all backends; the server is started again", laneServer, 1, ownServer, killPostmaster},
	{"terminate", "sessions are terminated", laneServer, 5, nil, terminate},
	{"frozen-commit", "commits are durable and not visible: they wait for a standby that never answers", laneServer, 4, ownServer, freeze},
	{"isolation", "the default isolation of new sessions is raised, and sessions are terminated", laneServer, 3, ownsDatabase, raise},
	{"disk-data", "the file system of the logs is full", laneServer, 2, smallDisks, fillData},
	{"disk-wal", "the file system of the WAL is full", laneServer, 1, smallDisks, fillWAL},
	{"upgrade", "all functions are installed anew, as an upgrade does", laneServer, 2, unbroken, upgrade},
	{"consumer", "SIGKILL of a consumer's process", laneProcess, 4, signals, func(_ context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
		return t.kill(rng, false)
	}},
	{"producer", "SIGKILL of a producer's process", laneProcess, 2, signals, func(_ context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
		return t.kill(rng, true)
	}},
	{"suspend", "SIGSTOP of a consumer's process for longer than its lease", laneProcess, 3, signals, suspend},
	{"cut-before", "a connection is cut before a request arrives", laneNetwork, 3, nil, cut("cut-before")},
	{"cut-after", "a connection is cut when a request has arrived", laneNetwork, 3, nil, cut("cut-after")},
	{"cut-answer", "a connection is cut in place of the answer", laneNetwork, 3, nil, cut("cut-answer")},
	{"half-open", "a process's connections swallow everything, and nobody is told", laneNetwork, 1, nil, halfOpen},
	{"long", "a transaction that writes to other tables of this database stays open, or prepared", laneSQL, 2, nil, long},
	{"long-producer", "a transaction that has produced stays open", laneSQL, 3, nil, longProducer},
	{"elsewhere", "a transaction in another database stays open, or prepared", laneSQL, 2, ownServer, elsewhere},
	{"prepared", "a prepared transaction that has produced stays", laneSQL, 3, canPrepare, prepared},
	{"maintenance", "maintenance from four sides without a pause", laneSQL, 2, nil, maintenance},
	{"pause", "a group is paused", laneSQL, 1, nil, pauseGroup},
	{"clock", "a producer's clock is ten minutes slow: it says so in the time of delivery", laneSQL, 2, nil, slowClock},
}

// FaultNames are the kinds of faults that there are.
func FaultNames() (names []string) {
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return names
}

// Faults describes each kind of fault, a line each.
func Faults() string {
	var b strings.Builder
	for _, k := range kinds {
		fmt.Fprintf(&b, "  %-14s %s\n", k.name, k.what)
	}
	return b.String()
}

func ownServer(t *torture) string {
	switch {
	case t.server == nil:
		return "needs a private server"
	case !canSignal:
		return "needs signals"
	}
	return ""
}

func signals(*torture) string {
	if !canSignal {
		return "needs signals"
	}
	return ""
}

func ownsDatabase(t *torture) string {
	if !t.owns {
		return "needs the owner of the database"
	}
	return ""
}

func canPrepare(t *torture) string {
	if t.maxPrepared == 0 {
		return "needs max_prepared_transactions above 0"
	}
	return ""
}

func unbroken(t *torture) string {
	if t.o.Break != "" {
		return "would mend what --break has broken"
	}
	return ""
}

func smallDisks(t *torture) string {
	if lacks := ownServer(t); lacks != "" {
		return lacks
	}
	return t.noDisks
}

// happened is a fault that was made.
type happened struct {
	Kind string `json:"kind"`
	// Began and Ended are in microseconds since the torture began.
	Began    int64  `json:"began_us"`
	Ended    int64  `json:"ended_us"`
	Detail   string `json:"detail,omitempty"`
	concerns []int
}

// torment makes the faults of a lane until ctx ends: each kind once, and from then on by their weights.
func (t *torture) torment(ctx context.Context, l lane) {
	rng := rand.New(rand.NewPCG(t.o.Seed, 1000+uint64(l)))
	var deck []*kind
	var pending sync.WaitGroup
	defer pending.Wait()
	for first := true; ; first = false {
		if len(deck) == 0 {
			for i := range kinds {
				k := &kinds[i]
				if k.lane != l || !t.active[k.name] {
					continue
				}
				n := k.weight
				if first {
					n = 1
				}
				for range n {
					deck = append(deck, k)
				}
			}
			if len(deck) == 0 {
				return
			}
			rng.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		gap := time.Duration(float64(gaps[l]) / t.o.Pace)
		pause(ctx, between(rng, gap/4, gap*7/4))
		if ctx.Err() != nil {
			return
		}
		k := deck[0]
		deck = deck[1:]
		own := rand.New(rand.NewPCG(rng.Uint64(), uint64(l)))
		if k.name == "suspend" || k.name == "half-open" { // they take long, and others of their lane go on
			pending.Go(func() { t.inflict(ctx, k, own) })
		} else {
			t.inflict(ctx, k, own)
		}
	}
}

func (t *torture) inflict(ctx context.Context, k *kind, rng *rand.Rand) {
	h := happened{Kind: k.name, Began: t.rec.now()}
	var err error
	h.Detail, h.concerns, err = k.do(ctx, t, rng)
	h.Ended = t.rec.now()
	switch {
	case errors.Is(err, errNothing), err != nil && ctx.Err() != nil:
		return
	case err != nil:
		t.failedFault(k.name, err)
		return
	}
	t.mu.Lock()
	t.happened = append(t.happened, h)
	t.mu.Unlock()
}

// crash does what makes the server crash, and waits until it is up again. Nobody looks at settled heads meanwhile. What was
// committed without waiting for the disk may be lost, from the beginning of it on.
func (t *torture) crash(do func() error) error {
	t.observing.Lock()
	defer t.observing.Unlock()
	c := crash{began: t.rec.now()}
	if err := do(); err != nil {
		return err
	}
	err := t.revive()
	c.up = t.rec.now()
	t.mu.Lock()
	t.crashes = append(t.crashes, c)
	t.mu.Unlock()
	return err
}

// revive waits until the server accepts connections, and starts one that does not come up by itself.
func (t *torture) revive() error {
	for until := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		err := within(10*time.Second, func(ctx context.Context) error {
			conn, err := t.control(ctx)
			if err == nil {
				err = conn.Close(ctx)
			}
			return err
		})
		if err == nil {
			return nil
		}
		if t.server.PID() == 0 {
			err = within(time.Minute, t.server.StartAgain)
		}
		if time.Now().After(until) {
			return fmt.Errorf("the server is not up again: %w", err)
		}
	}
}

// control opens a connection for a fault.
func (t *torture) control(ctx context.Context) (*pgx.Conn, error) { return t.connect(ctx, t.dsn) }

func (t *torture) connect(ctx context.Context, dsn string) (*pgx.Conn, error) {
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.RuntimeParams["application_name"] = "weir torture"
	config.RuntimeParams["synchronous_commit"] = "local" // not to wait for a standby that never answers
	return pgx.ConnectConfig(call, config)
}

// insist repeats for a minute what must not be left out, since it takes a fault back.
func insist(f func(ctx context.Context) error) error {
	for until := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := within(10*time.Second, f)
		if err == nil || time.Now().After(until) {
			return err
		}
	}
}

// order runs statements, one by one, until all of them have succeeded.
func (t *torture) order(statements ...string) error {
	return insist(func(ctx context.Context) error {
		conn, err := t.control(ctx)
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		for _, s := range statements {
			if _, err := conn.Exec(ctx, s); err != nil {
				return err
			}
		}
		return nil
	})
}

func (t *torture) victims(ctx context.Context, rng *rand.Rand, most int) ([]int32, error) {
	conn, err := t.control(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	rows, err := conn.Query(ctx, text(t.o.Schema, "sessions"), fmt.Sprint(rng.Uint64()))
	if err != nil {
		return nil, err
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int32])
	if err == nil && len(pids) == 0 {
		err = errNothing
	}
	return pids[:min(most, len(pids))], err
}

func killBackend(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	pids, err := t.victims(ctx, rng, 1)
	if err != nil {
		return "", nil, err
	}
	witness, err := t.control(ctx)
	if err != nil {
		return "", nil, err
	}
	err = t.crash(func() error {
		if err := killProcess(int(pids[0])); err != nil {
			return errNothing // it has just ended
		}
		waitForCrash(witness, 20*time.Second) // without one it was about to end anyway
		return nil
	})
	return fmt.Sprintf("process %d", pids[0]), nil, err
}

// waitForCrash waits until the server has dropped a connection, and closes it.
func waitForCrash(conn *pgx.Conn, most time.Duration) {
	_ = within(most, func(ctx context.Context) error {
		for conn.Ping(ctx) == nil {
			pause(ctx, 5*time.Millisecond)
		}
		return conn.Close(ctx)
	})
}

func killPostmaster(_ context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	return "", nil, t.crash(func() error {
		if err := within(15*time.Second, t.server.Crash); err != nil {
			return err
		}
		time.Sleep(time.Duration(rng.Int64N(int64(300 * time.Millisecond))))
		return within(time.Minute, t.server.StartAgain)
	})
}

func terminate(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	pids, err := t.victims(ctx, rng, 1+rng.IntN(4))
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("%d sessions", len(pids)), nil, t.terminate(ctx, pids)
}

func (t *torture) terminate(ctx context.Context, pids []int32) error {
	conn, err := t.control(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, pid := range pids {
		if _, err := conn.Exec(ctx, text(t.o.Schema, "terminate"), pid); err != nil {
			return err
		}
	}
	return nil
}

func between(rng *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(rng.Int64N(int64(high-low)))
}

func freeze(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	d := between(rng, 200*time.Millisecond, 2500*time.Millisecond)
	if err := t.order(text("", "freeze"), text("", "reload")); err != nil {
		return "", nil, err
	}
	pause(ctx, d/2)
	detail := fmt.Sprintf("for %v", d.Round(time.Millisecond))
	if rng.IntN(3) == 0 { // a commit that nobody waits for any more is visible at once
		if pids, err := t.victims(ctx, rng, 3); err == nil && t.terminate(ctx, pids) == nil {
			detail += ", sessions terminated meanwhile"
		}
	}
	pause(ctx, d/2)
	return detail, nil, t.order(text("", "thaw"), text("", "reload"))
}

func raise(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	level := []string{"repeatable read", "serializable"}[rng.IntN(2)]
	if err := t.order(strings.Replace(text("", "isolation_set"), "LEVEL", level, 1)); err != nil {
		return "", nil, err
	}
	for range 3 {
		if pids, err := t.victims(ctx, rng, 4); err == nil {
			_ = t.terminate(ctx, pids) // the next sessions have the level also without
		}
		pause(ctx, between(rng, 300*time.Millisecond, time.Second))
	}
	return level, nil, t.order(text("", "isolation_reset"))
}

func fillData(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	remove, err := ballast(t.small)
	if err != nil {
		return "", nil, err
	}
	d := between(rng, 500*time.Millisecond, 2*time.Second)
	pause(ctx, d)
	return fmt.Sprintf("for %v", d.Round(time.Millisecond)), nil, remove()
}

func fillWAL(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	d := between(rng, 0, 500*time.Millisecond)
	err := t.crash(func() error {
		conn, err := t.control(ctx)
		if err != nil {
			return err
		}
		defer conn.Close(context.Background())
		remove, err := ballast(t.wal)
		if err != nil {
			return err
		}
		// What was set aside is used up first. The next segment has no room, and the server gives up.
		_ = within(20*time.Second, func(ctx context.Context) error {
			for {
				if _, err := conn.Exec(ctx, text("", "switch_wal")); err != nil {
					return err
				}
			}
		})
		pause(ctx, d)
		return remove()
	})
	return fmt.Sprintf("for %v after the crash", d.Round(time.Millisecond)), nil, err
}

func upgrade(ctx context.Context, t *torture, _ *rand.Rand) (string, []int, error) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	conn, err := t.control(call)
	if err != nil {
		return "", nil, err
	}
	defer conn.Close(call)
	if _, err := conn.Exec(call, text(t.o.Schema, "outdate")); err != nil {
		return "", nil, err
	}
	for try := 0; ; try++ {
		if err = t.c.Migrate(call); err == nil || try == 5 {
			return "", nil, err
		}
		pause(call, 200*time.Millisecond)
	}
}

// some picks a slot.
func (t *torture) some(rng *rand.Rand, fits func(s *slot) bool) *slot {
	var list []*slot
	for _, s := range t.slots {
		if fits(s) {
			list = append(list, s)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return list[rng.IntN(len(list))]
}

func (t *torture) kill(rng *rand.Rand, producer bool) (string, []int, error) {
	s := t.some(rng, func(s *slot) bool { return (s.group < 0) == producer })
	proc := s.kill()
	if proc == 0 {
		return "", nil, errNothing
	}
	if producer {
		return fmt.Sprintf("process %d", proc), nil, nil
	}
	return fmt.Sprintf("process %d of %s", proc, s.role()), []int{s.group}, nil
}

func suspend(_ context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	s := t.some(rng, func(s *slot) bool { return s.group >= 0 })
	d := between(rng, lease+lease/4, 2*lease)
	proc := s.suspend(d)
	if proc == 0 {
		return "", nil, errNothing
	}
	return fmt.Sprintf("process %d of %s for %v", proc, s.role(), d.Round(time.Millisecond)), []int{s.group}, nil
}

func concerns(s *slot) []int {
	if s.group < 0 {
		return nil
	}
	return []int{s.group}
}

func cut(how string) func(context.Context, *torture, *rand.Rand) (string, []int, error) {
	return func(_ context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
		s := t.some(rng, func(s *slot) bool { return s.proxy != nil })
		if !s.proxy.arm(how, time.Second) {
			return "", nil, errNothing
		}
		return "of a process of " + s.role(), concerns(s), nil
	}
}

func halfOpen(_ context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	s := t.some(rng, func(s *slot) bool { return s.proxy != nil })
	d := between(rng, lease, 5*lease/2)
	n := s.proxy.halfOpen(d)
	if n == 0 {
		return "", nil, errNothing
	}
	return fmt.Sprintf("%d connections of a process of %s for %v", n, s.role(), d.Round(time.Millisecond)), concerns(s), nil
}

func long(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	return t.open(ctx, t.dsn, rng)
}

func elsewhere(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	return t.open(ctx, t.server.DSN("postgres"), rng)
}

// open holds a transaction that has written something, in a session or prepared.
func (t *torture) open(ctx context.Context, dsn string, rng *rand.Rand) (string, []int, error) {
	d := between(rng, time.Second, 4*time.Second)
	prepare, gid := rng.IntN(3) == 0 && canPrepare(t) == "", fmt.Sprintf("weir_torture_%x", rng.Uint64())
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), d+10*time.Second)
	defer cancel()
	conn, err := t.connect(call, dsn)
	if err != nil {
		return "", nil, err
	}
	defer conn.Close(call)
	for _, statement := range []string{"begin", text("", "write_something")} {
		if _, err := conn.Exec(call, statement); err != nil {
			return "", nil, err
		}
	}
	if !prepare {
		pause(ctx, d)
		_, _ = conn.Exec(call, "rollback") // a crash may have come first
		return fmt.Sprintf("for %v", d.Round(time.Millisecond)), nil, nil
	}
	if _, err := conn.Exec(call, "prepare transaction '"+gid+"'"); err != nil {
		return "", nil, err
	}
	pause(ctx, d)
	return fmt.Sprintf("prepared, for %v", d.Round(time.Millisecond)), nil, t.end(dsn, "rollback prepared '"+gid+"'")
}

// produce begins a transaction that produces some messages, in the torture's own name.
func (t *torture) produce(ctx context.Context, conn *pgx.Conn, rng *rand.Rand, at time.Time) (e entry, tx pgx.Tx, err error) {
	topic := rng.IntN(len(topics))
	n := 1 + rng.IntN(20)
	first := makeValue(t.rec.now()/t.era.Microseconds(), t.rec.proc, t.seq.Add(int64(n))-int64(n))
	e = entry{kind: entryStarted, where: int64(topic), items: make([]item, n)}
	messages := make([]weir.Message, n)
	for i := range n {
		v := first + int64(i)
		e.items[i].value = v
		messages[i] = weir.Message{Key: keyOf(topic, v), Payload: payload{V: v}, DeliverAt: at}
	}
	if err := t.rec.add(e); err != nil {
		return e, nil, err
	}
	fail := func(err error) (entry, pgx.Tx, error) {
		e.kind = entryFailed
		return e, nil, errors.Join(err, t.rec.add(e))
	}
	if tx, err = conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}); err != nil {
		return fail(err)
	}
	produced, err := t.c.ProduceTx(ctx, tx, topics[topic].name, messages...)
	if err != nil {
		return fail(err)
	}
	ids := make([]int64, n)
	for i, p := range produced {
		ids[i] = p.ID
		e.items[i].id = p.ID
	}
	if _, err := tx.Exec(ctx, text(t.o.Schema, "ledger_add"), topic, first, ids); err != nil {
		return fail(err)
	}
	return e, tx, nil
}

func longProducer(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	return t.producing(ctx, rng, between(rng, 500*time.Millisecond, 3*time.Second), time.Time{})
}

func slowClock(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	return t.producing(ctx, rng, 0, time.Now().Add(-10*time.Minute))
}

func (t *torture) producing(ctx context.Context, rng *rand.Rand, d time.Duration, at time.Time) (string, []int, error) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), d+10*time.Second)
	defer cancel()
	conn, err := t.control(call)
	if err != nil {
		return "", nil, err
	}
	defer conn.Close(call)
	e, tx, err := t.produce(call, conn, rng, at)
	if err != nil {
		return "", nil, err
	}
	pause(ctx, d)
	end := entryProduced
	if rng.IntN(4) == 0 {
		_ = tx.Rollback(call) // where it fails the connection is lost, which does the same
		end = entryFailed
	} else {
		e.kind = entryCommit
		if err := t.rec.add(e); err != nil {
			return "", nil, err
		}
		if tx.Commit(call) != nil {
			end = entryUnknown
		}
	}
	e.kind = end
	return fmt.Sprintf("of topic %s for %v", topics[e.where].name, d.Round(time.Millisecond)), nil, t.rec.add(e)
}

func prepared(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	d := between(rng, 500*time.Millisecond, 3*time.Second)
	gid := fmt.Sprintf("weir_torture_%x", rng.Uint64())
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	conn, err := t.control(call)
	if err != nil {
		return "", nil, err
	}
	defer conn.Close(call)
	e, tx, err := t.produce(call, conn, rng, time.Time{})
	if err != nil {
		return "", nil, err
	}
	end := entryFailed
	if _, err := tx.Exec(call, "prepare transaction '"+gid+"'"); err != nil {
		// Whether it was prepared is not known. It may yet be, on a connection that is lost.
		for range 2 {
			time.Sleep(500 * time.Millisecond)
			_ = t.end(t.dsn, "rollback prepared '"+gid+"'")
		}
		e.kind = entryUnknown
		return "", nil, errors.Join(errNothing, t.rec.add(e))
	}
	pause(ctx, d)
	statement := "rollback prepared '" + gid + "'"
	if rng.IntN(3) > 0 {
		statement, end = "commit prepared '"+gid+"'", entryProduced
		e.kind = entryCommit
		if err := t.rec.add(e); err != nil {
			return "", nil, err
		}
	}
	if t.end(t.dsn, statement) != nil {
		end = entryUnknown
	}
	e.kind = end
	return fmt.Sprintf("of topic %s for %v", topics[e.where].name, d.Round(time.Millisecond)), nil, t.rec.add(e)
}

// end ends a prepared transaction; one that is not there was ended by an attempt whose answer was lost.
func (t *torture) end(dsn, statement string) error {
	return insist(func(ctx context.Context) error {
		conn, err := t.connect(ctx, dsn)
		if err != nil {
			return err
		}
		defer conn.Close(ctx)
		if _, err = conn.Exec(ctx, statement); code(err) == "42704" {
			return nil
		}
		return err
	})
}

func maintenance(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	d := between(rng, 300*time.Millisecond, 1500*time.Millisecond)
	busy, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	var all sync.WaitGroup
	var mu sync.Mutex
	n := 0
	for range 4 {
		all.Go(func() {
			for busy.Err() == nil {
				_, any, _ := t.c.Maintain(busy)
				if any {
					mu.Lock()
					n++
					mu.Unlock()
				} else {
					pause(busy, 5*time.Millisecond)
				}
			}
		})
	}
	all.Wait()
	return fmt.Sprintf("%d pieces in %v", n, d.Round(time.Millisecond)), nil, nil
}

func pauseGroup(ctx context.Context, t *torture, rng *rand.Rand) (string, []int, error) {
	g := rng.IntN(len(groups))
	spec := groups[g]
	topic := topics[spec.topic].name
	if _, err := t.c.PauseGroup(ctx, topic, spec.name); err != nil {
		return "", nil, err
	}
	pause(ctx, between(rng, 300*time.Millisecond, 1500*time.Millisecond))
	return "group " + spec.name, []int{g}, insist(func(ctx context.Context) error {
		_, err := t.c.ResumeGroup(ctx, topic, spec.name)
		return err
	})
}

// checkFaults refuses kinds that there are not.
func checkFaults(names []string) error {
	for _, n := range names {
		if !slices.ContainsFunc(kinds, func(k kind) bool { return k.name == n }) {
			return refuse("there is no fault %q: the kinds are %s", n, strings.Join(FaultNames(), ", "))
		}
	}
	return nil
}
