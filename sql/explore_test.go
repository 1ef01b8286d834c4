package sql_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir/internal/history"
	"github.com/weirhq/weir/sql/testdata"
)

// program is a few short sessions, each a list of steps. The steps of one session run in their order; those of different
// sessions in every order.
//
//	begin, commit, rollback, savepoint, undo (rollback to the savepoint), prepare, finish (commit prepared)
//	repeatable     begin isolation level repeatable read
//	xid            take an xid, and do nothing else
//	produce        one message
//	insert, copy   one message, by hand
//	poll, claim    a turn of a consumer: as the library calls, or as plain SQL does
//	observe        a turn that takes nothing: it moves the fence
//	fetch, ack     what the session's claims have given
//	take, grab     poll and fetch; claim and fetch
type program struct {
	name     string
	sessions []string
	// eager: the proof by lock is tried at once, not only after a while.
	eager bool
}

var programs = []program{
	{"two producers, one poller", []string{"begin xid produce commit", "begin produce commit", "poll poll"}, false},
	{"two producers, one that is always at work", []string{"begin produce commit", "begin produce commit", "take take take"}, false},
	{"a producer that rolls back, one by hand", []string{"begin produce rollback", "begin insert commit", "take take"}, false},
	{"savepoints", []string{"begin savepoint produce undo produce commit", "produce", "poll poll"}, true},
	{"prepared", []string{"begin produce prepare finish", "begin produce commit", "poll poll"}, true},
	{"a claim in a transaction that wrote", []string{"begin produce commit", "copy", "begin xid grab commit"}, false},
	{"the same with a proof by lock", []string{"begin produce commit", "produce", "begin xid grab commit"}, true},
	{"a claim at repeatable read", []string{"begin produce commit", "produce", "repeatable xid grab commit"}, true},
	{"two consumers", []string{"begin produce produce commit", "take ack", "take ack"}, false},
	{"two claims in transactions", []string{"produce observe", "begin grab commit", "begin grab commit"}, true},
	{"produce and claim in one transaction", []string{"begin produce commit", "begin produce grab commit", "take"}, true},
}

// explorer runs schedules of programs on one database.
type explorer struct {
	b        *bench
	sessions []*actor
	drainer  *actor
	values   int
}

// actor is one session of a program.
type actor struct {
	*session
	rec    *history.Recorder
	open   []string // values produced in the open transaction
	ids    []int64
	inTx   bool
	gid    string
	leases []int64 // claimed and not fetched
	held   []int64 // fetched and not acknowledged
	acking map[int64][]int64
	under  *pending // a step that waits for a lock
}

func newExplorer(b *bench, sessions int) *explorer {
	x := &explorer{b: b}
	for i := range sessions {
		x.sessions = append(x.sessions, &actor{session: b.session(fmt.Sprintf("s%d", i)), acking: map[int64][]int64{}})
	}
	x.drainer = &actor{session: b.session("drain"), acking: map[int64][]int64{}}
	return x
}

// run plays one schedule: a list of the sessions whose turn it is. It returns what the judge has to say.
func (x *explorer) run(p program, schedule []int) (history.Report, []history.Event) {
	rec := history.New()
	todo := make([][]string, len(p.sessions))
	for i, steps := range p.sessions {
		todo[i] = strings.Fields(steps)
		a := x.sessions[i]
		a.rec, a.open, a.ids, a.leases, a.held, a.inTx, a.gid = rec, nil, nil, nil, nil, false, ""
	}
	x.drainer.rec = rec
	one := func(i int) bool {
		a := x.sessions[i]
		if len(todo[i]) == 0 || a.waits() {
			return false
		}
		step := todo[i][0]
		todo[i] = todo[i][1:]
		x.step(a, step)
		x.observe(rec)
		return true
	}
	for _, i := range schedule {
		one(i)
	}
	// What a wait has put off, in any order that is possible.
	x.b.until("every session has come to its end", func() bool {
		left := false
		for i := range todo {
			for one(i) {
			}
			left = left || len(todo[i]) > 0 || x.sessions[i].waits()
		}
		return !left
	})
	for _, a := range x.sessions[:len(p.sessions)] {
		if a.inTx {
			x.step(a, "commit")
		}
		x.step(a, "fetch")
		x.step(a, "ack")
	}
	empty := 0
	x.b.until("the log is drained", func() bool {
		x.step(x.drainer, "poll")
		if len(x.drainer.leases) == 0 {
			if value[bool](x.drainer.session, "select claimed >= coalesce((select max(id) from weir.log_1), 0) from weir.cursor") {
				empty++
			}
		}
		x.step(x.drainer, "fetch")
		x.step(x.drainer, "ack")
		x.observe(rec)
		return empty > 1
	})
	events := rec.Events()
	return history.Judge(events, history.Options{Groups: []string{"g"}, NoRedelivery: true}), events
}

func (x *explorer) observe(rec *history.Recorder) {
	began := rec.Now()
	var settled, claimed int64
	err := x.b.watch.QueryRow(context.Background(),
		"select (select max(bound) from weir.fence_rows), (select claimed from weir.cursor)").Scan(&settled, &claimed)
	if err != nil {
		x.b.failf("observe: %w", err)
	}
	rec.SettledSince(began, "t", settled)
	rec.CursorAtSince(began, "g", claimed)
}

// waits reports whether the actor's last step is still under way; when it has ended meanwhile, that is taken note of.
func (a *actor) waits() bool {
	if a.under == nil {
		return false
	}
	select {
	case <-a.under.done:
		err := a.under.err
		a.under = nil
		if err != nil {
			a.b.failf("%s: %w", a.name, err)
		}
		return false
	default:
		return true
	}
}

// step begins a step, and returns when it has ended or waits for a lock.
func (x *explorer) step(a *actor, name string) {
	if name == "produce" || name == "insert" || name == "copy" {
		x.values++
	}
	p := a.beginFunc(name, func() error { return a.act(name, x.values) })
	a.under = p
	select {
	case <-p.done:
	case <-time.After(3 * time.Millisecond): // it is looked at; how soon decides nothing
		p.blocked()
	}
	a.waits()
}

func (a *actor) act(name string, n int) error {
	ctx := context.Background()
	switch name {
	case "begin":
		a.inTx = true
		return a.try("begin isolation level read committed")
	case "repeatable":
		a.inTx = true
		return a.try("begin isolation level repeatable read")
	case "xid":
		return a.try("select pg_current_xact_id()")
	case "savepoint":
		return a.try("savepoint s")
	case "undo":
		for _, v := range a.open {
			a.rec.ProduceFailed(v)
		}
		a.open, a.ids = nil, nil
		return a.try("rollback to s")
	case "produce", "insert", "copy":
		v := strconv.Itoa(n)
		a.rec.ProduceStarted("t", v, "")
		if !a.inTx {
			a.rec.Committing(v)
		}
		var id int64
		var err error
		switch name {
		case "produce":
			err = a.conn.QueryRow(ctx, "select weir.produce('t', $1::text::json)", v).Scan(&id)
		case "insert":
			err = a.conn.QueryRow(ctx, "insert into weir.log_1 (payload) values ($1::text::json) returning id", v).Scan(&id)
		case "copy":
			_, err = a.conn.CopyFrom(ctx, pgx.Identifier{"weir", "log_1"}, []string{"payload"}, pgx.CopyFromRows([][]any{{v}}))
			if err == nil {
				err = a.conn.QueryRow(ctx, "select id from weir.log_1 where payload::text = $1", v).Scan(&id)
			}
		}
		if err != nil {
			return err
		}
		if a.inTx {
			a.open, a.ids = append(a.open, v), append(a.ids, id)
		} else {
			a.rec.Produced("t", id, v, "")
		}
		return nil
	case "commit", "finish":
		for _, v := range a.open {
			a.rec.Committing(v)
		}
		text := "commit"
		if name == "finish" {
			text = "commit prepared '" + a.gid + "'"
		}
		if err := a.try(text); err != nil {
			return err
		}
		for i, v := range a.open {
			a.rec.Produced("t", a.ids[i], v, "")
		}
		a.open, a.ids, a.inTx = nil, nil, false
		return nil
	case "rollback":
		err := a.try("rollback")
		for _, v := range a.open {
			a.rec.ProduceFailed(v)
		}
		a.open, a.ids, a.inTx = nil, nil, false
		return err
	case "prepare":
		a.gid = a.b.database + a.name
		return a.try("prepare transaction '" + a.gid + "'")
	case "observe":
		_, err := a.tryPoll(own, 0)
		return err
	case "poll", "claim":
		rows, err := a.tryPoll(mode(name == "poll"), 100)
		if code(err) == "40001" { // what the isolation level is for: the transaction is over, another follows
			return a.act("rollback", 0)
		}
		if err != nil {
			return err
		}
		for _, r := range rows {
			if r.ID != nil {
				a.rec.Claimed("g", strconv.FormatInt(*r.ID, 10), *r.Low, *r.High, int(*r.Attempt))
				a.leases = append(a.leases, *r.ID)
			}
		}
		return nil
	case "take", "grab":
		if err := a.act(map[string]string{"take": "poll", "grab": "claim"}[name], 0); err != nil {
			return err
		}
		return a.act("fetch", 0)
	case "fetch":
		for _, lease := range a.leases {
			rows, err := a.conn.Query(ctx, "select id, payload::text from weir.fetch($1)", lease)
			if err != nil {
				return err
			}
			var id int64
			var v string
			if _, err := pgx.ForEachRow(rows, []any{&id, &v}, func() error {
				a.rec.HandleStarted("g", a.name, id, v, "", 1)
				a.acking[lease] = append(a.acking[lease], id)
				return nil
			}); err != nil {
				return err
			}
		}
		a.held, a.leases = append(a.held, a.leases...), nil
		return nil
	case "ack":
		for _, lease := range a.held {
			for _, id := range a.acking[lease] {
				a.rec.HandleEnded("g", a.name, id, true)
			}
			var accepted bool
			if err := a.conn.QueryRow(ctx, "select weir.ack($1, $2)", lease, a.name).Scan(&accepted); err != nil {
				return err
			}
			if !accepted {
				return fmt.Errorf("lease %d was lost", lease)
			}
			a.rec.Acked("g", strconv.FormatInt(lease, 10), accepted)
		}
		a.held = nil
		return nil
	}
	return fmt.Errorf("there is no step %q", name)
}

// schedules calls f with every order of the sessions' steps.
func schedules(counts []int, f func([]int) bool) bool {
	var schedule []int
	var next func() bool
	next = func() bool {
		done := true
		for i := range counts {
			if counts[i] == 0 {
				continue
			}
			done = false
			counts[i]--
			schedule = append(schedule, i)
			goOn := next()
			schedule = schedule[:len(schedule)-1]
			counts[i]++
			if !goOn {
				return false
			}
		}
		return !done || f(schedule)
	}
	return next()
}

func (p program) counts() []int {
	counts := make([]int, len(p.sessions))
	for i, s := range p.sessions {
		counts[i] = len(strings.Fields(s))
	}
	return counts
}

// eager makes the proof by lock the next thing after a poll that finds a pair.
var eager = bug{Name: "eager", Edits: []testdata.Edit{{
	File: "views/fence_rows.sql",
	Old:  "clock_timestamp() - f.observed_at > interval '100 ms' as overdue",
	New:  "true as overdue",
}}}

// explore runs every schedule of a program, or those that choose gives, until one violates. It returns how many were run.
func (l *lab) explore(p program, changes []bug, each func(counts []int, f func([]int) bool) bool) (n int, err error) {
	if p.eager {
		changes = append([]bug{eager}, changes...)
	}
	err = l.play(func(b *bench) {
		x := newExplorer(b, len(p.sessions))
		each(p.counts(), func(schedule []int) bool {
			n++
			report, events := x.run(p, schedule)
			if !report.OK() {
				b.failf("%s: schedule %v: %s\n%v", p.name, schedule, report.Violations[0], history.Around(events, history.Options{Groups: []string{"g"}, NoRedelivery: true}, report.Violations[0]))
			}
			return true
		})
	}, func(b *bench) { applyAll(b, changes) })
	return n, err
}

// applyAll applies several changes to the files they share.
func applyAll(b *bench, changes []bug) {
	var all bug
	for _, g := range changes {
		all.Name += g.Name + " "
		all.Edits = append(all.Edits, g.Edits...)
	}
	all.apply(b)
}

// TestExplore runs every interleaving, at the level of statements, of the programs above.
func TestExplore(t *testing.T) {
	l := newLab(t)
	total := 0
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			began := time.Now()
			n, err := l.explore(p, nil, schedules)
			if err != nil {
				t.Fatal(err)
			}
			total += n
			t.Logf("%d schedules in %v", n, time.Since(began).Round(time.Millisecond))
		})
	}
	fmt.Printf("explored %d schedules, 0 violations\n", total)
}

// TestExploreRandom runs random schedules of random programs of four to six sessions. WEIR_SEED replays one run, WEIR_RUNS
// sets how many programs are tried.
func TestExploreRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("WEIR_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("WEIR_SEED: %v", err)
		}
	}
	runs := 40
	if s := os.Getenv("WEIR_RUNS"); s != "" {
		var err error
		if runs, err = strconv.Atoi(s); err != nil {
			t.Fatalf("WEIR_RUNS: %v", err)
		}
	}
	t.Logf("seed %d", seed)
	fmt.Printf("random schedules: replay with WEIR_SEED=%d\n", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	shapes := []string{
		"begin produce commit", "begin xid produce commit", "begin produce rollback", "produce produce", "begin copy insert commit",
		"begin savepoint produce undo produce commit", "begin produce prepare finish", "take ack poll", "claim fetch ack",
		"begin grab commit", "begin xid claim fetch commit", "repeatable xid grab commit", "begin produce grab commit",
	}
	l := newLab(t)
	total := 0
	for run := range runs {
		p := program{name: fmt.Sprintf("random program %d of seed %d", run, seed), eager: rng.IntN(2) == 0}
		for range 4 + rng.IntN(3) {
			p.sessions = append(p.sessions, shapes[rng.IntN(len(shapes))])
		}
		n, err := l.explore(p, nil, func(counts []int, f func([]int) bool) bool {
			for range 20 {
				var schedule []int
				for i, c := range counts {
					schedule = append(schedule, slices.Repeat([]int{i}, c)...)
				}
				rng.Shuffle(len(schedule), func(i, j int) { schedule[i], schedule[j] = schedule[j], schedule[i] })
				if !f(schedule) {
					return false
				}
			}
			return true
		})
		total += n
		if err != nil {
			t.Fatalf("%v: %v", p.sessions, err)
		}
	}
	t.Logf("%d schedules of %d programs", total, runs)
}

// TestExploreFinds demands that the exploration finds bugs that the fence is there to prevent.
func TestExploreFinds(t *testing.T) {
	l := newLab(t)
	bugs := map[string]bug{}
	for _, g := range readBugs(t) {
		bugs[g.Name] = g
	}
	for _, c := range []struct {
		bug     string
		program int
	}{{"raw-head", 0}, {"snapshot-xmax", 0}, {"old-observer", 5}, {"holder-by-savepoint", 3}, {"look-in-repeatable-read", 7}, {"cursor-not-locked", 9}} {
		t.Run(c.bug, func(t *testing.T) {
			n, err := l.explore(programs[c.program], []bug{bugs[c.bug]}, schedules)
			if err == nil {
				t.Fatalf("%d schedules of %q did not find it", n, programs[c.program].name)
			}
			t.Logf("found in schedule %d", n)
		})
	}
}
