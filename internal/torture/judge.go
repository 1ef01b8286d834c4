package torture

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir/internal/history"
)

// Rules of the torture's own, beside those of history.
const (
	// ruleLedger: the ledger has not what a producer was told.
	ruleLedger history.Rule = "ledger"
	// ruleDead: a message is dead that no handler gave up.
	ruleDead history.Rule = "dead"
	// ruleStuck: after healing, a group did not come to its end.
	ruleStuck history.Rule = "stuck"
	// ruleInvariant: an invariant of sql/check does not hold at the end.
	ruleInvariant history.Rule = "invariant"
	// ruleProcess: a process ended by itself, or could not be stopped.
	ruleProcess history.Rule = "process"
)

// keepOfEach bounds how many violations of a rule are told in full.
const keepOfEach = 20

// judgement is what becomes of the records.
type judgement struct {
	t      *torture
	r      *Report
	eras   map[int]*bufio.Writer
	files  []*os.File
	b      []byte
	begins [6]map[int64]bool // milliseconds at which a group's handlings began
	told   map[history.Rule]int
}

func (j *judgement) breach(v history.Violation) {
	j.r.Violated[v.Kind]++
	if j.told[v.Kind]++; j.told[v.Kind] <= keepOfEach {
		j.r.Violations = append(j.r.Violations, v)
	}
}

// judge judges everything, era by era.
func (t *torture) judge(ctx context.Context, drained bool) (*Report, error) {
	j := &judgement{t: t, eras: map[int]*bufio.Writer{}, told: map[history.Rule]int{}}
	j.r = t.newReport(ctx)
	for g := range j.begins {
		j.begins[g] = map[int64]bool{}
	}
	if !drained {
		s, left, err := t.lags(ctx)
		if err != nil {
			return nil, err
		}
		for g, lag := range s.lag {
			if lag > 0 {
				j.breach(history.Violation{
					Kind: ruleStuck, Group: groups[g].name,
					Message: fmt.Sprintf("group %q has %d ids left, %v after everything was healed", groups[g].name, lag, t.o.Drain),
				})
			}
		}
		if j.r.Violated[ruleStuck] == 0 {
			j.breach(history.Violation{Kind: ruleStuck, Message: fmt.Sprintf("%d messages wait or are held, %v after everything was healed", left, t.o.Drain)})
		}
	}
	for _, text := range t.oddities {
		j.breach(history.Violation{Kind: ruleProcess, Message: text})
	}
	if err := j.invariants(ctx); err != nil {
		return nil, err
	}
	if err := t.execute(ctx, "set local default_tablespace = ''; "+text(t.o.Schema, "lease_index")); err != nil {
		return nil, err
	}
	if err := j.split(ctx); err != nil {
		return nil, err
	}
	j.heads()
	numbers := make([]int, 0, len(j.eras))
	for n := range j.eras {
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	for _, n := range numbers {
		if err := j.window(ctx, n); err != nil {
			return nil, err
		}
	}
	j.r.Eras = len(numbers)
	j.recoveries()
	j.series()
	j.r.OK = len(j.r.Violated) == 0
	return j.r, nil
}

// invariants runs the queries of sql/check. While a segment is made or dropped some of them look violated: a call that was given up
// may still be at work, and on a server of others their segments come and go.
func (j *judgement) invariants(ctx context.Context) error {
	t := j.t
	for until := time.Now().Add(patience); time.Now().Before(until); pause(ctx, 50*time.Millisecond) {
		var busy int
		if err := t.pool.QueryRow(ctx, text(t.o.Schema, "busy")).Scan(&busy); err != nil {
			return err
		}
		if busy == 0 {
			break
		}
	}
	for try := 1; ; try++ {
		checks, err := t.c.Check(ctx)
		if err != nil {
			return err
		}
		var found []history.Violation
		for _, c := range checks {
			for _, text := range c.Violations {
				found = append(found, history.Violation{Kind: ruleInvariant, Message: c.Name + ": " + text})
			}
		}
		if len(found) == 0 || t.server != nil || try == 10 {
			for _, v := range found {
				j.breach(v)
			}
			return nil
		}
		pause(ctx, 500*time.Millisecond)
	}
}

// split sorts all records, and what the database knows, by eras.
func (j *judgement) split(ctx context.Context) error {
	t := j.t
	for n := range t.procs.Load() + 1 {
		err := readRecord(recordPath(t.folder, n), func(e *entry) error {
			if e.kind == entryBegin {
				j.begins[e.where][e.time/1000] = true
			}
			return j.sort(e)
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	rows, err := t.pool.Query(ctx, text(t.o.Schema, "ledger"))
	if err != nil {
		return err
	}
	var (
		e     entry
		first int64
		ids   []int64
	)
	e.kind = entryLedger
	if _, err := pgx.ForEachRow(rows, []any{&e.where, &first, &ids}, func() error {
		e.items = e.items[:0]
		for i, id := range ids {
			e.items = append(e.items, item{value: first + int64(i), id: id})
		}
		return j.sort(&e)
	}); err != nil {
		return err
	}
	if rows, err = t.pool.Query(ctx, text(t.o.Schema, "effects")); err != nil {
		return err
	}
	var (
		values []int64
		leases []string
	)
	e = entry{kind: entryEffect}
	if _, err := pgx.ForEachRow(rows, []any{&e.where, &e.proc, &ids, &values, &leases, &e.time}, func() error {
		e.time = t.local(e.time)
		e.items = e.items[:0]
		for i, id := range ids {
			e.items = append(e.items, item{value: values[i], id: id, lease: leases[i]})
		}
		return j.sort(&e)
	}); err != nil {
		return err
	}
	for _, spec := range topics {
		if rows, err = t.pool.Query(ctx, text(t.o.Schema, "dead"), spec.name); err != nil {
			return err
		}
		var group, value, why string
		var id int64
		if _, err := pgx.ForEachRow(rows, []any{&group, &id, &value, &why}, func() error {
			v, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return err
			}
			g := slices.IndexFunc(groups, func(g groupSpec) bool { return g.name == group })
			return j.sort(&entry{kind: entryDead, where: int64(g), items: []item{{value: v, id: id, wrongKey: why}}})
		}); err != nil {
			return err
		}
	}
	if rows, err = t.pool.Query(ctx, text(t.o.Schema, "double_ids")); err != nil {
		return err
	}
	var topic, n int
	var id int64
	if _, err := pgx.ForEachRow(rows, []any{&topic, &id, &n}, func() error {
		j.breach(history.Violation{
			Kind: history.TwoContents, Topic: topics[topic].name, ID: id,
			Message: fmt.Sprintf("id %d of topic %q was given to %d messages", id, topics[topic].name, n),
		})
		return nil
	}); err != nil {
		return err
	}
	for _, w := range j.eras {
		err = errors.Join(err, w.Flush())
	}
	for _, f := range j.files {
		err = errors.Join(err, f.Close())
	}
	return err
}

// local is a time of the server's clock on that of the records.
func (t *torture) local(micros int64) int64 { return micros + t.offset - t.base }

// sort writes an entry into the files of the eras of its messages.
func (j *judgement) sort(e *entry) error {
	all := e.items
	defer func() { e.items = all }()
	for items := all; len(items) > 0; {
		era := eraOf(items[0].value)
		n := 1
		for n < len(items) && eraOf(items[n].value) == era {
			n++
		}
		e.items = items[:n]
		w := j.eras[era]
		if w == nil {
			f, err := os.Create(j.eraPath(era))
			if err != nil {
				return err
			}
			w = bufio.NewWriterSize(f, 1<<16)
			j.files, j.eras[era] = append(j.files, f), w
		}
		j.b = e.encode(j.b[:0])
		if _, err := w.Write(j.b); err != nil {
			return err
		}
		items = items[n:]
	}
	return nil
}

func (j *judgement) eraPath(era int) string {
	return filepath.Join(j.t.folder, fmt.Sprintf("era-%d.record", era))
}

// heads judges the settled heads by themselves: they belong to no era.
func (j *judgement) heads() {
	var events []history.Event
	for _, h := range j.t.heads {
		events = append(events, h.event(len(events)))
	}
	for _, c := range j.t.crashes {
		events = append(events, crashed(c, len(events)))
	}
	for _, v := range history.Judge(events, history.Options{Keep: 1 << 20}).Violations {
		j.breach(v)
	}
}

func (h head) event(seq int) history.Event {
	return history.Event{
		Kind: history.KindSettled, Time: h.at * 1000, Began: h.began * 1000, Seq: int64(seq), Topic: topics[h.topic].name, ID: h.settled,
	}
}

// crashed stands at the beginning of a crash, within which nobody looks at settled heads. When the server was up again is noticed
// later than others come in.
func crashed(c crash, seq int) history.Event {
	return history.Event{Kind: history.KindRestarted, Time: c.began * 1000, Seq: int64(seq)}
}

// window judges one era.
func (j *judgement) window(ctx context.Context, era int) error {
	t := j.t
	type at struct {
		group int64
		id    int64
	}
	var (
		events   []history.Event
		values   = map[int64]string{}
		words    = map[string]string{}
		known    = map[int64]bool{}  // values that were begun -> with the ledger
		ledger   = map[int64]int64{} // value -> id
		outcomes = map[int64]int{}   // value -> what its producer was told
		givenUp  = map[at]bool{}
		firsts   = map[string]int64{} // lease -> when it was first seen
		groupOf  = map[string]int64{}
		last     int64
		from, to int64 = 1 << 62, 0 // when its messages were committed
	)
	name := func(v int64) string {
		s, ok := values[v]
		if !ok {
			s = strconv.FormatInt(v, 10)
			values[v] = s
		}
		return s
	}
	same := func(s string) string {
		if k, ok := words[s]; ok {
			return k
		}
		words[s] = s
		return s
	}
	consumers := map[int64]string{}
	add := func(e history.Event) {
		e.Seq = int64(len(events))
		events = append(events, e)
	}
	path := j.eraPath(era)
	err := readRecord(path, func(e *entry) error {
		last = max(last, e.time)
		base := history.Event{Proc: int32(e.proc), Time: e.time * 1000}
		switch e.kind {
		case entryStarted, entryCommit, entryProduced, entryFailed, entryUnknown:
			from, to = min(from, e.time), max(to, e.time)
			base.Topic = topics[e.where].name
		case entryLedger, entryGivenUp, entryDead, entryWithout:
		default:
			base.Group = groups[e.where].name
			if consumers[e.proc] == "" {
				consumers[e.proc] = fmt.Sprint("c", e.proc)
			}
			base.By = consumers[e.proc]
		}
		topic := e.where
		if base.Group != "" {
			topic = int64(groups[e.where].topic)
		}
		for _, i := range e.items {
			v := base
			v.Value = name(i.value)
			switch e.kind {
			case entryStarted:
				v.Kind, v.Key = history.KindProduceStarted, same(keyOf(int(topic), i.value))
				known[i.value] = !e.own
			case entryCommit:
				v.Kind = history.KindCommitting
			case entryProduced:
				v.Kind, v.ID, v.Key = history.KindProduced, i.id, same(keyOf(int(topic), i.value))
				outcomes[i.value] = e.kind
			case entryFailed:
				v.Kind = history.KindProduceFailed
				outcomes[i.value] = e.kind
			case entryUnknown:
				v.Kind = history.KindProduceUnknown
			case entryLedger:
				ledger[i.value] = i.id
				continue
			case entryWithout:
				j.r.Strays++
				continue
			case entryGivenUp:
				givenUp[at{e.where, i.id}] = true
				continue
			case entryDead:
				j.r.Dead++
				if !givenUp[at{e.where, i.id}] {
					j.breach(history.Violation{
						Kind: ruleDead, Group: groups[e.where].name, ID: i.id, Value: v.Value,
						Message: fmt.Sprintf("group %q has id %d for dead, which no handler gave up: %s", groups[e.where].name, i.id, i.wrongKey),
					})
				}
				add(history.Event{Kind: history.KindDead, Group: groups[e.where].name, ID: i.id, Time: last * 1000})
				continue
			case entryBegin:
				v.Kind, v.ID, v.Attempt, v.Lease = history.KindHandleStarted, i.id, int32(i.attempt), same(i.lease)
				v.Key = i.wrongKey
				if v.Key == "" {
					v.Key = same(keyOf(int(topic), i.value))
				}
				if _, seen := firsts[v.Lease]; !seen {
					firsts[v.Lease], groupOf[v.Lease] = e.time, e.where
				}
			case entryEnd:
				v.Kind, v.ID, v.OK, v.Lease, v.Value = history.KindHandleEnded, i.id, i.ok, same(i.lease), ""
			case entryEffect:
				v.Kind, v.ID, v.OK, v.Lease, v.Value = history.KindHandleEnded, i.id, true, same(i.lease), ""
				add(v)
				v.Kind, v.OK, v.Lease, v.By = history.KindEffect, false, "", ""
			}
			add(v)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	last++
	for v, withLedger := range known {
		told := outcomes[v]
		if told == 0 {
			j.r.Unknown++
		}
		if !withLedger {
			continue
		}
		id, stored := ledger[v]
		add(history.Event{Kind: history.KindResolved, Value: name(v), OK: stored, ID: id, Time: last * 1000})
		switch {
		case stored && told == entryFailed:
			j.breach(history.Violation{
				Kind: ruleLedger, ID: id, Value: name(v), Message: fmt.Sprintf("value %d is stored, and its producer was told that it is not", v),
			})
		case !stored && told == entryProduced:
			j.breach(history.Violation{
				Kind: ruleLedger, Value: name(v), Message: fmt.Sprintf("value %d is not in the ledger, and its producer was told that it is stored", v),
			})
		case told == 0:
			j.r.Resolved++
		}
	}
	for v, id := range ledger {
		if withLedger, begun := known[v]; !begun || !withLedger {
			j.breach(history.Violation{
				Kind: history.Phantom, ID: id, Value: name(v), Message: fmt.Sprintf("the ledger has value %d, which nobody produced", v),
			})
		}
	}
	if err := j.leases(ctx, firsts, groupOf, add); err != nil {
		return err
	}
	for _, c := range t.crashes {
		add(crashed(c, 0))
	}
	for _, h := range t.heads {
		if h.at >= from-3_000_000 && h.at <= to {
			add(h.event(0))
		}
	}
	o := history.Options{Keep: keepOfEach, Slack: 5*time.Millisecond + t.blur, Topics: map[string]string{}}
	for _, g := range groups {
		o.Groups = append(o.Groups, g.name)
		o.Topics[g.name] = topics[g.topic].name
		if topics[g.topic].mode == "ordered" {
			o.OrderedGroups = append(o.OrderedGroups, g.name)
		}
		if g.once {
			o.EffectOnceGroups = append(o.EffectOnceGroups, g.name)
		}
	}
	j.merge(history.Judge(events, o))
	return nil
}

// leases adds how the leases of an era ended.
func (j *judgement) leases(ctx context.Context, firsts map[string]int64, groupOf map[string]int64, add func(history.Event)) error {
	t := j.t
	names := make([]string, 0, len(firsts))
	for l := range firsts {
		names = append(names, l)
	}
	slices.Sort(names)
	ended := map[string]bool{}
	for some := range slices.Chunk(names, 5000) {
		rows, err := t.pool.Query(ctx, text(t.o.Schema, "lease_ends"), some)
		if err != nil {
			return err
		}
		var lease, how string
		var at, asked, expires int64
		if _, err := pgx.ForEachRow(rows, []any{&lease, &how, &at, &asked, &expires}, func() error {
			ended[lease] = true
			e := history.Event{Group: groups[groupOf[lease]].name, By: lease, Proc: -1}
			lost := e
			lost.Kind, lost.Time = history.KindLeaseLost, t.local(min(at, expires))*1000
			if how != "acknowledged" {
				add(lost)
				return nil
			}
			j.r.Acknowledged++
			// What was asked for in time may be noted late.
			if asked > expires {
				add(lost)
			}
			e.Kind, e.OK, e.Time = history.KindAcked, true, t.local(at)*1000
			add(e)
			return nil
		}); err != nil {
			return err
		}
	}
	// A lease without an end is a claim that a crash took back. It may have been made, and seen, while the server was about to crash:
	// how long it lasted is then not known.
	for _, l := range names {
		if ended[l] {
			continue
		}
		for _, c := range t.crashes {
			if c.up > firsts[l] {
				add(history.Event{Kind: history.KindLeaseLost, Group: groups[groupOf[l]].name, By: l, Proc: -1, Time: max(c.began, firsts[l]) * 1000})
				break
			}
		}
	}
	return nil
}

func (j *judgement) merge(r history.Report) {
	j.r.Events += r.Events
	j.r.Messages += r.Stored
	j.r.RolledBack += r.Failed
	j.r.Unresolved += r.Unresolved
	for rule, n := range r.Violated {
		if rule == history.Fall {
			continue // heads has them all
		}
		j.r.Violated[rule] += n
	}
	for _, v := range r.Violations {
		if j.told[v.Kind]++; v.Kind != history.Fall && j.told[v.Kind] <= keepOfEach {
			j.r.Violations = append(j.r.Violations, v)
		}
	}
	for i := range j.r.Groups {
		g := &j.r.Groups[i]
		if one := r.Groups[g.Group]; one != nil {
			g.Handled += one.Distinct
			g.Redelivered += one.Redelivered
			g.Again += one.Duplicates
			g.Lost += one.Lost
			g.LeasesLost += one.LeasesLost
			g.Strays += one.Strays
			g.Effects += one.Effects
		}
	}
}

// recoveries finds for each fault how long it took after its end until deliveries went on, and until what had been produced by
// then was handled, in each group that it concerns.
func (j *judgement) recoveries() {
	t := j.t
	var begins [6][]int64
	for g := range begins {
		for at := range j.begins[g] {
			begins[g] = append(begins[g], at)
		}
		slices.Sort(begins[g])
	}
	by := map[string]*FaultReport{}
	for i := range j.r.Faults {
		by[j.r.Faults[i].Kind] = &j.r.Faults[i]
	}
	slices.SortFunc(t.happened, func(a, b happened) int { return cmp.Compare(a.Began, b.Began) })
	j.r.Happened = t.happened
	resumed, caught := map[string][]float64{}, map[string][]float64{}
	for _, h := range t.happened {
		by[h.Kind].Count++
		concerned := h.concerns
		if concerned == nil {
			concerned = []int{0, 1, 2, 3, 4, 5}
		}
		goOn, up := 0.0, 0.0
		for _, g := range concerned {
			if k, _ := slices.BinarySearch(begins[g], h.Ended/1000); k < len(begins[g]) {
				goOn = max(goOn, float64(begins[g][k]*1000-h.Ended)/1e6)
			}
			up = max(up, j.caughtUp(g, h.Ended))
		}
		resumed[h.Kind] = append(resumed[h.Kind], max(0, goOn))
		caught[h.Kind] = append(caught[h.Kind], up)
	}
	for kind, f := range by {
		f.Resumed, f.CaughtUp = spreadOf(resumed[kind]), spreadOf(caught[kind])
	}
}

// caughtUp is how long after a moment, in seconds, a group had handled what was produced by then.
func (j *judgement) caughtUp(g int, moment int64) float64 {
	samples := j.t.samples
	k, _ := slices.BinarySearchFunc(samples, moment, func(s sample, at int64) int { return cmp.Compare(s.at, at) })
	if k == len(samples) {
		return 0
	}
	head := samples[k].heads[groups[g].topic]
	for _, s := range samples[k:] {
		if s.committed[g] >= head {
			return float64(s.at-moment) / 1e6
		}
	}
	return float64(samples[len(samples)-1].at-moment) / 1e6
}
