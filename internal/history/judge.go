package history

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"sort"
)

// Judge checks a history against the rules and counts what it holds. The
// events may come in any order; they are judged in the order of their times.
// It takes O(n log n) for n events, claims being counted by the messages they
// span.
//
// A handling that is recorded with its lease counts while that lease is not
// lost: what begins later, or ends well later, is no handling of the group's.
// It neither keeps others from the key nor lets them go on, and the message is
// lost if it is all that was done for it. Of handlings without a lease the
// judge only knows which claims held their message.
func Judge(events []Event, o Options) Report {
	return newJudge(events, o).run()
}

// mark refers to an event by its place in the order of time, counted from 1,
// so that the zero mark is no event.
type mark = int32

// message is what is known of one value.
type message struct {
	value, key string
	topic      *topic
	id         int64
	keyed      bool // whether key is known
	placed     bool // whether id is known
	stored     bool // by a Resolved event
	begun      int32
	failures   int32

	started, produced, failed, unknown, resolved, handled mark

	// The highest settled head that was known when its commit began. snap is
	// the event that stands for that moment and committing its quality.
	head       int64
	headAt     mark
	snap       mark
	committing bool
}

// isStored tells whether the message is known to be in the log.
func (m *message) isStored() bool { return m.produced != 0 || m.stored }

// maybeStored tells whether the message can be in the log: an attempt to
// produce it succeeded or is not accounted for.
func (m *message) maybeStored() bool {
	if m.isStored() {
		return true
	}
	return m.resolved == 0 && (m.unknown != 0 || m.begun > m.failures)
}

// slot is a position of a topic that occurs in the history.
type slot struct {
	id    int64
	msg   int32 // index into judge.messages plus 1; 0 if the value is not known
	key   int32 // index into topic.keys plus 1; 0 if none
	rank  int32 // place among the slots of its key plus 1; 0 if not in order
	first mark  // the event that told the contents
}

type topic struct {
	name   string
	slots  []slot
	byID   map[int64]int32
	keys   [][]int32 // for each key its slots, by id
	heads  peaks
	silent int // messages of which the history does not tell
}

func (t *topic) slot(id int64) int32 {
	if i, ok := t.byID[id]; ok {
		return i
	}
	i := int32(len(t.slots))
	t.slots = append(t.slots, slot{id: id})
	t.byID[id] = i
	return i
}

// between returns the range of slots with ids in (low, high]; the slots must
// be sorted by then.
func (t *topic) between(low, high int64) (from, to int32) {
	above := func(id int64) int32 {
		return int32(sort.Search(len(t.slots), func(i int) bool { return t.slots[i].id > id }))
	}
	if high <= low {
		return 0, 0
	}
	return above(low), above(high)
}

// peaks are the observations of a number that exceeded all before them.
type peaks struct {
	at    []mark
	value []int64
}

type claim struct {
	at        mark
	low, high int64
	lost      mark // when the lease was reported lost
	everLost  bool // whether it is, at any time of the history
	fresh     bool
	epoch     int32
	handlings []int32 // those recorded with this lease
}

type handling struct {
	start, end, cut mark
	slot            int32
	claim           int32 // index into group.claims plus 1
	next            int32 // the next open handling of the slot, plus 1
	epoch           int32
	leased          bool // it was recorded with its lease, which claim is
	stray           bool // that lease was lost before it began
}

// Flags of a slotState.
const (
	wasHandled = 1 << iota // handled well at least once
	wasDead
	wasAcked // a lease that held it was acknowledged, whatever was handled
	wasPassed
	wasPhantom
	wasDone // done as far as the order of its key goes
	wasStuck
)

// slotState is what a group did with a slot.
type slotState struct {
	claim   int32 // latest claim that holds it, plus 1
	open    int32 // first open handling, plus 1
	ok      mark  // first good handling since the latest seek
	ack     mark  // first acknowledgement of it
	last    mark  // start of the last good handling with a lease
	by      int32 // the claim that was the lease of it, plus 1
	epoch   int32 // which ok, ack, last and by are of
	starts  int32
	effects int32
	flags   uint8
}

type group struct {
	name                    string
	topic                   *topic
	complete, ordered, once bool
	rep                     *GroupReport
	state                   []slotState
	claims                  []claim
	byLease                 map[string]int32
	nextClaim               int32
	handlings               []handling
	epoch                   int32 // how many seeks there were
	seek                    mark
	reached                 int64 // highest id claimed or handled
	cursor                  peaks
	waiting                 []int32        // for each key, the first of its slots that is not done
	lastEnd                 map[int32]mark // of dead slots, the end of the last handling
	firstEffect             []mark
}

// identity is what makes two violations of different histories the same one.
type identity struct {
	kind         Rule
	topic, group string
	id           int64
	value, lease string
	variant      int64
}

func (v *Violation) identity() identity {
	return identity{v.Kind, v.Topic, v.Group, v.ID, v.Value, v.Lease, v.variant}
}

type judge struct {
	o         Options
	events    []Event
	perm      []int32 // order of the events; nil if they are in order
	keep      int
	want      *identity // if set, only tell in hit whether it occurs
	hit       bool
	rep       Report
	topics    map[string]*topic
	topicList []*topic
	messages  []message
	byValue   map[string]int32
	groups    map[string]*group
	groupList []*group
	restarts  []mark
}

func newJudge(events []Event, o Options) *judge {
	j := &judge{
		o: o, events: events, keep: o.Keep,
		topics: map[string]*topic{}, byValue: map[string]int32{}, groups: map[string]*group{},
		rep: Report{
			Events: len(events), Groups: map[string]*GroupReport{},
			Faults: map[string]int{}, Violated: map[Rule]int{},
		},
	}
	if j.keep <= 0 {
		j.keep = 100
	}
	if !inOrder(events) {
		j.perm = make([]int32, len(events))
		for i := range j.perm {
			j.perm[i] = int32(i)
		}
		slices.SortFunc(j.perm, func(a, b int32) int {
			return cmp.Or(order(&events[a], &events[b]), cmp.Compare(a, b))
		})
	}
	return j
}

func inOrder(events []Event) bool {
	for i := 1; i < len(events); i++ {
		a, b := &events[i-1], &events[i]
		if a.Time > b.Time || a.Time == b.Time && a.Proc == b.Proc && a.Seq > b.Seq {
			return false
		}
	}
	return true
}

func (j *judge) ev(i mark) *Event {
	if j.perm != nil {
		return &j.events[j.perm[i-1]]
	}
	return &j.events[i-1]
}

// before tells whether event a certainly came before event b.
func (j *judge) before(a, b mark) bool {
	if a == 0 || a >= b {
		return false
	}
	x, y := j.ev(a), j.ev(b)
	return x.Proc == y.Proc || x.Time+int64(j.o.Slack) < y.Time
}

// breach reports a violation. The text and the events are put together only
// if they are going to be read.
func (j *judge) breach(v Violation, at []mark, format string, args ...any) {
	if j.want != nil {
		if v.identity() == *j.want {
			j.hit = true
		}
		return
	}
	j.rep.Violated[v.Kind]++
	if j.rep.Violated[v.Kind] > j.keep {
		return
	}
	v.Message = fmt.Sprintf(format, args...)
	at = slices.DeleteFunc(slices.Clone(at), func(i mark) bool { return i == 0 })
	slices.Sort(at)
	for _, i := range slices.Compact(at) {
		v.Events = append(v.Events, *j.ev(i))
	}
	j.rep.Violations = append(j.rep.Violations, v)
}

func (j *judge) run() Report {
	j.prepare()
	for _, g := range j.groupList {
		g.state = make([]slotState, len(g.topic.slots))
		if g.ordered {
			g.waiting = make([]int32, len(g.topic.keys))
		}
		if g.once {
			g.firstEffect = make([]mark, len(g.topic.slots))
		}
		clear(g.byLease)
	}
	j.restarts = j.restarts[:0] // those that the walk is past
	for i := mark(1); int(i) <= len(j.events); i++ {
		e := j.ev(i)
		if e.Kind == KindRestarted {
			j.restarts = append(j.restarts, i)
			for _, g := range j.groupList {
				g.cursor = peaks{}
			}
		}
		if g := j.groups[e.Group]; g != nil && isGroupEvent(e.Kind) {
			j.step(g, i, e)
		}
	}
	for _, g := range j.groupList {
		j.finish(g)
	}
	return j.rep
}

// prepare learns what is true of the whole history: the messages, where they
// are, and which topics the groups read.
func (j *judge) prepare() {
	for _, name := range slices.Sorted(maps.Values(j.o.Topics)) {
		j.topic(name)
	}
	for i := mark(1); int(i) <= len(j.events); i++ {
		j.learnProduce(i, j.ev(i))
	}
	j.findGroups()
	for i := mark(1); int(i) <= len(j.events); i++ {
		e := j.ev(i)
		if g := j.groups[e.Group]; g != nil && isGroupEvent(e.Kind) {
			j.learnGroup(g, i, e)
		}
	}
	for i := range j.messages {
		j.judgeMessage(&j.messages[i])
	}
	for _, t := range j.topicList {
		j.arrange(t)
	}
	j.lastEnds()
}

func isGroupEvent(k Kind) bool {
	switch k {
	case KindClaimed, KindHandleStarted, KindHandleEnded, KindAcked, KindLeaseLost,
		KindDead, KindCursorAt, KindSeek, KindEffect:
		return true
	}
	return false
}

func (j *judge) topic(name string) *topic {
	t := j.topics[name]
	if t == nil {
		t = &topic{name: name, byID: map[int64]int32{}}
		j.topics[name] = t
		j.topicList = append(j.topicList, t)
	}
	return t
}

func (j *judge) message(value string) int32 {
	if i, ok := j.byValue[value]; ok {
		return i
	}
	i := int32(len(j.messages))
	j.messages = append(j.messages, message{value: value})
	j.byValue[value] = i
	return i
}

func (j *judge) learnProduce(i mark, e *Event) {
	switch e.Kind {
	case KindFault:
		j.rep.Faults[e.Value]++
		return
	case KindRestarted:
		j.restarts = append(j.restarts, i)
		for _, t := range j.topicList {
			t.heads = peaks{}
		}
		return
	case KindSettled:
		if j.sawBeforeRestart(e) {
			return
		}
		t := j.topic(e.Topic)
		if p := j.fell(&t.heads, i, e); p != 0 {
			j.breach(Violation{Kind: Fall, Topic: e.Topic, ID: e.ID, variant: j.ev(p).ID}, []mark{p, i},
				"the settled head of topic %q fell from %d to %d", e.Topic, j.ev(p).ID, e.ID)
		}
		return
	case KindProduceStarted, KindCommitting, KindProduced, KindProduceFailed, KindProduceUnknown, KindResolved:
	default:
		return
	}
	n := j.message(e.Value)
	m := &j.messages[n]
	if m.topic == nil && (e.Topic != "" || e.Kind == KindProduceStarted || e.Kind == KindProduced) {
		m.topic = j.topic(e.Topic)
	}
	switch e.Kind {
	case KindProduceStarted:
		m.begun++
		if m.started == 0 {
			m.started, m.key, m.keyed = i, e.Key, true
		}
		if m.snap == 0 {
			j.snapshot(m, i, false)
		}
	case KindCommitting:
		// When the outcome of an earlier attempt is unknown, that attempt may
		// be the one that counts; only its moment is then sure to be early
		// enough.
		m.begun = max(m.begun, m.failures+1)
		if !m.committing {
			j.snapshot(m, i, true)
		}
	case KindProduced:
		m.produced = i
		j.place(n, j.topic(e.Topic), e.ID, i, e)
	case KindProduceFailed:
		m.begun = max(m.begun, m.failures+1)
		m.failures++
		m.failed = i
		if m.begun == m.failures && m.unknown == 0 {
			m.snap, m.committing = 0, false
		}
	case KindProduceUnknown:
		m.unknown = i
	case KindResolved:
		m.resolved, m.stored = i, e.OK
		if e.OK {
			t := m.topic
			if t == nil {
				t = j.firstTopic()
			}
			j.place(n, t, e.ID, i, e)
		}
	}
}

// firstTopic stands in where nothing names the topic: mostly it is the only one.
func (j *judge) firstTopic() *topic {
	if len(j.topicList) > 0 {
		return j.topicList[0]
	}
	return j.topic("")
}

// snapshot notes the settled head known at an event that precedes a commit.
func (j *judge) snapshot(m *message, i mark, committing bool) {
	m.snap, m.committing, m.head, m.headAt = i, committing, 0, 0
	if m.topic == nil {
		return
	}
	p := &m.topic.heads
	// The newest peak may be too close to tell; then an older one counts.
	for k := len(p.at) - 1; k >= 0; k-- {
		if j.before(p.at[k], i) {
			m.head, m.headAt = p.value[k], p.at[k]
			return
		}
	}
}

// place notes that an event saw message n at an id.
func (j *judge) place(n int32, t *topic, id int64, i mark, e *Event) {
	m := &j.messages[n]
	k := t.slot(id)
	s := &t.slots[k]
	if !m.placed {
		m.placed, m.topic, m.id = true, t, id
	} else if m.topic != t || m.id != id {
		var first mark
		if f, ok := m.topic.byID[m.id]; ok {
			first = m.topic.slots[f].first
		}
		j.breach(Violation{Kind: TwoPlaces, Topic: t.name, ID: id, Value: m.value}, []mark{first, i},
			"value %q was seen at id %d of topic %q and at id %d of topic %q", m.value, m.id, m.topic.name, id, t.name)
	}
	if s.msg == 0 {
		s.msg, s.first = n+1, i
	}
	if !m.keyed && e.Kind != KindResolved {
		m.key, m.keyed = e.Key, true
	}
	switch known := &j.messages[s.msg-1]; {
	case known != m:
		j.breach(Violation{Kind: TwoContents, Topic: t.name, ID: id, Value: m.value, variant: 1}, []mark{s.first, i},
			"id %d of topic %q has value %q and value %q", id, t.name, known.value, m.value)
	case e.Kind != KindResolved && m.key != e.Key:
		j.breach(Violation{Kind: TwoContents, Topic: t.name, ID: id, Value: m.value, variant: 2}, []mark{m.started, s.first, i},
			"value %q at id %d of topic %q has key %q and key %q", m.value, id, t.name, m.key, e.Key)
	}
}

// fell adds an observation to the peaks and returns the earlier one, if any,
// that it falls below.
func (j *judge) fell(p *peaks, i mark, e *Event) (from mark) {
	k := len(p.at) - 1
	if e.Began != 0 {
		began := e.Began - int64(j.o.Slack)
		k = sort.Search(len(p.at), func(k int) bool { return j.ev(p.at[k]).Time >= began }) - 1
	} else {
		for k >= 0 && !j.before(p.at[k], i) {
			k--
		}
	}
	if k >= 0 && p.value[k] > e.ID {
		from = p.at[k]
	}
	if n := len(p.value); n == 0 || e.ID > p.value[n-1] {
		p.at, p.value = append(p.at, i), append(p.value, e.ID)
	}
	return from
}

// restarted tells whether the server crashed between two events.
func (j *judge) restarted(from, to mark) bool {
	return slices.ContainsFunc(j.restarts, func(r mark) bool { return from < r && r < to })
}

// sawBeforeRestart tells whether an observation may be of the time before the
// latest crash.
func (j *judge) sawBeforeRestart(e *Event) bool {
	n := len(j.restarts)
	return n > 0 && e.Began != 0 && e.Began <= j.ev(j.restarts[n-1]).Time
}

// findGroups makes the groups and tells which topics they read.
func (j *judge) findGroups() {
	byGroup := map[string]*topic{}
	for name, t := range j.o.Topics {
		byGroup[name] = j.topics[t]
	}
	get := func(name string) *group {
		g := j.groups[name]
		if g == nil {
			g = &group{name: name, byLease: map[string]int32{}, rep: &GroupReport{}, reached: math.MinInt64}
			j.groups[name] = g
			j.groupList = append(j.groupList, g)
			j.rep.Groups[name] = g.rep
		}
		return g
	}
	for _, name := range j.o.Groups {
		get(name).complete = true
	}
	for _, name := range j.o.OrderedGroups {
		get(name).ordered = true
	}
	for _, name := range j.o.EffectOnceGroups {
		get(name).once = true
	}
	several := len(j.topicList) > 1
	for i := mark(1); int(i) <= len(j.events); i++ {
		e := j.ev(i)
		if !isGroupEvent(e.Kind) {
			continue
		}
		g := get(e.Group)
		if several && e.Kind == KindHandleStarted && byGroup[g.name] == nil {
			if n, ok := j.byValue[e.Value]; ok && j.messages[n].topic != nil {
				byGroup[g.name] = j.messages[n].topic
			}
		}
	}
	for _, g := range j.groupList {
		g.topic = byGroup[g.name]
		if g.topic == nil && several && (g.complete || g.ordered || g.once) {
			j.breach(Violation{Kind: Setup, Group: g.name}, nil,
				"there are %d topics and nothing tells which of them group %q reads", len(j.topicList), g.name)
		}
		switch {
		case g.topic != nil:
		case several:
			g.topic = &topic{byID: map[int64]int32{}}
			j.topicList = append(j.topicList, g.topic)
		default:
			g.topic = j.firstTopic()
		}
		g.rep.Topic = g.topic.name
	}
}

func (j *judge) learnGroup(g *group, i mark, e *Event) {
	switch e.Kind {
	case KindHandleStarted:
		n := j.valueAt(g, e)
		if n < 0 {
			n = j.message(e.Value)
		}
		m := &j.messages[n]
		if m.handled == 0 {
			m.handled = i
		}
		s := &g.topic.slots[g.topic.slot(e.ID)]
		if s.msg != n+1 || !m.keyed || m.key != e.Key {
			j.place(n, g.topic, e.ID, i, e)
		}
	case KindHandleEnded, KindEffect:
		g.topic.slot(e.ID)
	case KindDead:
		g.topic.slot(e.ID)
		if g.ordered && g.lastEnd == nil {
			g.lastEnd = map[int32]mark{}
		}
	case KindClaimed:
		g.byLease[e.By] = int32(len(g.claims))
		g.claims = append(g.claims, claim{at: i, low: e.Low, high: e.High, fresh: e.Attempt <= 1})
	case KindLeaseLost:
		if c, ok := g.byLease[e.By]; ok {
			g.claims[c].everLost = true
		}
	case KindAcked:
		if c, ok := g.byLease[e.By]; ok && !e.OK {
			g.claims[c].everLost = true
		}
	}
}

// valueAt returns the message that an event saw, or -1. Looking at its id
// first spares most look-ups by value.
func (j *judge) valueAt(g *group, e *Event) int32 {
	if k, ok := g.topic.byID[e.ID]; ok {
		if n := g.topic.slots[k].msg; n != 0 && j.messages[n-1].value == e.Value {
			return n - 1
		}
	}
	if n, ok := j.byValue[e.Value]; ok {
		return n
	}
	return -1
}

func (j *judge) judgeMessage(m *message) {
	switch {
	case m.produced != 0:
		j.rep.Produced++
		j.rep.Stored++
	case m.stored:
		j.rep.Stored++
	case m.maybeStored():
		j.rep.Unresolved++
		if m.topic != nil {
			m.topic.silent++
		}
	case m.failed != 0 || m.resolved != 0:
		j.rep.Failed++
	}
	if m.placed && m.headAt != 0 && m.id <= m.head && m.maybeStored() &&
		!j.restarted(m.headAt, cmp.Or(m.produced, m.unknown, m.resolved, m.handled)) {
		at := cmp.Or(m.produced, m.resolved, m.handled)
		j.breach(Violation{Kind: Skip, Topic: m.topic.name, ID: m.id, Value: m.value}, []mark{m.headAt, m.snap, at},
			"value %q appeared at id %d of topic %q, where %d was seen as settled before its commit began",
			m.value, m.id, m.topic.name, m.head)
	}
}

// arrange sorts the slots of a topic and lists those of each key.
func (j *judge) arrange(t *topic) {
	byID := func(a, b slot) int { return cmp.Compare(a.id, b.id) }
	if !slices.IsSortedFunc(t.slots, byID) {
		slices.SortFunc(t.slots, byID)
		for i := range t.slots {
			t.byID[t.slots[i].id] = int32(i)
		}
	}
	keys := map[string]int32{}
	for i := range t.slots {
		s := &t.slots[i]
		if s.msg == 0 {
			continue
		}
		m := &j.messages[s.msg-1]
		if m.key == "" {
			continue
		}
		k, ok := keys[m.key]
		if !ok {
			k = int32(len(t.keys))
			keys[m.key] = k
			t.keys = append(t.keys, nil)
		}
		s.key = k + 1
		// A message that cannot be stored is a phantom and nobody can be asked
		// to wait for it.
		if m.maybeStored() {
			t.keys[k] = append(t.keys[k], int32(i))
			s.rank = int32(len(t.keys[k]))
		}
	}
}

// lastEnds finds, for messages that ordered groups gave up, when their last
// handling ended. That they are dead may be noticed only later, and those
// that follow need not wait for the notice.
func (j *judge) lastEnds() {
	if !slices.ContainsFunc(j.groupList, func(g *group) bool { return g.lastEnd != nil }) {
		return
	}
	each := func(kind Kind, f func(g *group, slot int32, i mark)) {
		for i := mark(1); int(i) <= len(j.events); i++ {
			if e := j.ev(i); e.Kind == kind {
				if g := j.groups[e.Group]; g.lastEnd != nil {
					f(g, g.topic.slot(e.ID), i)
				}
			}
		}
	}
	each(KindDead, func(g *group, slot int32, i mark) { g.lastEnd[slot] = 0 })
	each(KindHandleEnded, func(g *group, slot int32, i mark) {
		if _, dead := g.lastEnd[slot]; dead {
			g.lastEnd[slot] = i
		}
	})
}

// step takes a group through one event.
func (j *judge) step(g *group, i mark, e *Event) {
	switch e.Kind {
	case KindClaimed:
		j.claimed(g, i, e)
	case KindHandleStarted:
		j.handleStarted(g, i, e)
	case KindHandleEnded:
		j.handleEnded(g, i, e)
	case KindAcked:
		j.acked(g, i, e)
	case KindLeaseLost:
		j.leaseLost(g, i, e)
	case KindDead:
		st := &g.state[g.topic.slot(e.ID)]
		if st.flags&wasDead == 0 {
			g.rep.Dead++
		}
		st.flags |= wasDead | wasDone
	case KindSeek:
		j.sought(g, i, e)
	case KindCursorAt:
		if j.sawBeforeRestart(e) {
			return
		}
		// A look that a seek came into may have seen either side of it.
		if g.seek != 0 && e.Began != 0 && e.Began <= j.ev(g.seek).Time {
			return
		}
		if p := j.fell(&g.cursor, i, e); p != 0 {
			j.breach(Violation{Kind: Fall, Group: g.name, ID: e.ID, variant: j.ev(p).ID}, []mark{p, i},
				"the position of group %q fell from %d to %d without a seek", g.name, j.ev(p).ID, e.ID)
		}
	case KindEffect:
		j.effect(g, i, e)
	}
}

func (j *judge) claimed(g *group, i mark, e *Event) {
	n := g.nextClaim
	g.nextClaim++
	g.byLease[e.By] = n
	g.claims[n].epoch = g.epoch
	g.rep.Claims++
	if e.Attempt > 1 {
		g.rep.Reclaimed++
	}
	g.reached = max(g.reached, e.High)
	from, to := g.topic.between(e.Low, e.High)
	for s := from; s < to; s++ {
		st := &g.state[s]
		// A holder that lost its lease may notice only later. If it did at
		// all, it had lost it by the time another one got the ids.
		for h := st.open; h != 0; h = g.handlings[h-1].next {
			if o := &g.handlings[h-1]; o.cut == 0 && o.claim != 0 && g.claims[o.claim-1].everLost {
				o.cut = i
			}
		}
		st.claim = n + 1
	}
}

func (j *judge) handleStarted(g *group, i mark, e *Event) {
	k := g.topic.slot(e.ID)
	st, s := &g.state[k], &g.topic.slots[k]
	g.rep.Started++
	if st.starts++; st.starts > 1 {
		g.rep.Redelivered++
	}
	g.reached = max(g.reached, e.ID)
	h := handling{start: i, slot: k, claim: st.claim, next: st.open, epoch: g.epoch}
	if e.Lease != "" {
		n := g.lease(e.Lease)
		c := &g.claims[n]
		h.claim, h.leased, h.stray = n+1, true, c.lost != 0
		c.handlings = append(c.handlings, int32(len(g.handlings)))
		if h.stray {
			g.rep.Strays++
		}
	}
	g.handlings = append(g.handlings, h)
	st.open = int32(len(g.handlings))

	m := &j.messages[j.valueAt(g, e)]
	if st.flags&wasPhantom == 0 {
		v := Violation{Kind: Phantom, Topic: g.topic.name, Group: g.name, ID: e.ID, Value: e.Value}
		switch {
		case !m.maybeStored() && m.failed == 0 && m.resolved == 0:
			st.flags |= wasPhantom
			j.breach(v, []mark{i}, "group %q handled value %q at id %d, which was never produced", g.name, e.Value, e.ID)
		case !m.maybeStored():
			st.flags |= wasPhantom
			v.variant = 1
			j.breach(v, []mark{m.failed, m.resolved, i},
				"group %q handled value %q at id %d, which was not stored", g.name, e.Value, e.ID)
		case j.before(i, m.started):
			st.flags |= wasPhantom
			v.variant = 2
			j.breach(v, []mark{i, m.started},
				"group %q handled value %q at id %d before its production began", g.name, e.Value, e.ID)
		}
	}
	if !g.ordered || s.rank == 0 || h.stray {
		return
	}
	line := g.topic.keys[s.key-1]
	w := g.waiting[s.key-1]
	for int(w) < len(line) && g.state[line[w]].flags&(wasDone|wasPassed) != 0 {
		w++
	}
	g.waiting[s.key-1] = w
	if w < s.rank-1 {
		// Everything behind a message that is stuck would be out of order;
		// telling it once is enough.
		p := line[w]
		if g.state[p].flags&wasStuck != 0 {
			return
		}
		g.state[p].flags |= wasStuck
		ps := &g.topic.slots[p]
		at := []mark{ps.first, i}
		for h := g.state[p].open; h != 0; h = g.handlings[h-1].next {
			at = append(at, g.handlings[h-1].start)
		}
		j.breach(Violation{Kind: Order, Topic: g.topic.name, Group: g.name, ID: e.ID, Value: e.Value, variant: ps.id}, at,
			"group %q started id %d of key %q while id %d of that key was not done", g.name, e.ID, m.key, ps.id)
	}
}

func (j *judge) handleEnded(g *group, i mark, e *Event) {
	k := g.topic.slot(e.ID)
	st := &g.state[k]
	// Of the open handlings the one of the same consumer is the one that
	// ended; the latest, if a crash left an earlier one open.
	link := &st.open
	for *link != 0 {
		if b := j.ev(g.handlings[*link-1].start); b.By == e.By && b.Lease == e.Lease {
			break
		}
		link = &g.handlings[*link-1].next
	}
	start, epoch, by := i, g.epoch, int32(0)
	if *link != 0 {
		h := &g.handlings[*link-1]
		h.end = i
		start, epoch = h.start, h.epoch
		*link = h.next
		switch {
		case !h.leased:
		case h.stray || h.cut != 0:
			if e.OK && !h.stray {
				g.rep.Strays++
			}
			if !e.OK {
				g.rep.Failed++
			}
			return
		default:
			by = h.claim
		}
	}
	if last, dead := g.lastEnd[k]; dead && last == i {
		st.flags |= wasDone
	}
	if !e.OK {
		g.rep.Failed++
		return
	}
	g.rep.Handled++
	if st.flags&wasHandled == 0 {
		g.rep.Distinct++
	} else {
		g.rep.Duplicates++
	}
	st.flags |= wasHandled | wasDone
	if epoch != g.epoch {
		return
	}
	if st.epoch != epoch {
		st.epoch, st.ok, st.ack, st.last, st.by = epoch, 0, 0, 0, 0
	}
	was := st.by
	if by != 0 {
		st.last, st.by = start, by
	}
	if st.ok == 0 {
		st.ok = i
		return
	}
	if j.o.AllowDuplicates {
		return
	}
	v := Violation{Kind: Duplicate, Topic: g.topic.name, Group: g.name, ID: e.ID}
	if j.before(st.ack, start) {
		j.breach(v, []mark{st.ok, st.ack, start, i}, "group %q handled id %d again after it was acknowledged", g.name, e.ID)
	} else if by != 0 && by == was {
		v.variant = 2
		j.breach(v, []mark{st.ok, start, i}, "group %q handled id %d twice under lease %s", g.name, e.ID, e.Lease)
	} else if j.o.NoRedelivery {
		v.variant = 1
		j.breach(v, []mark{st.ok, start, i}, "group %q handled id %d again", g.name, e.ID)
	}
}

func (j *judge) acked(g *group, i mark, e *Event) {
	if !e.OK {
		g.rep.Rejected++
		return
	}
	g.rep.Acked++
	n, ok := g.byLease[e.By]
	if !ok {
		return
	}
	c := &g.claims[n]
	if j.before(c.lost, i) {
		j.breach(Violation{Kind: LateAck, Topic: g.topic.name, Group: g.name, Lease: e.By}, []mark{c.at, c.lost, i},
			"group %q: the acknowledgement of lease %s was accepted after the lease was lost", g.name, e.By)
	}
	from, to := g.topic.between(c.low, c.high)
	for s := from; s < to; s++ {
		st := &g.state[s]
		st.flags |= wasAcked
		// An acknowledgement from before a seek says nothing of after it.
		if st.ok != 0 && st.epoch == g.epoch && c.epoch == g.epoch && st.ack == 0 {
			st.ack = i
		}
	}
	for _, h := range c.handlings {
		st := &g.state[g.handlings[h].slot]
		if st.by == n+1 && st.epoch == g.epoch && g.handlings[h].epoch == g.epoch && st.ack == 0 {
			st.ack = i
		}
	}
}

func (j *judge) leaseLost(g *group, i mark, e *Event) {
	g.rep.LeasesLost++
	// The claim need not be in the record, a late acknowledgement of the lease
	// can be told nevertheless.
	n := g.lease(e.By)
	c := &g.claims[n]
	if c.lost == 0 {
		c.lost = i
	}
	for _, h := range c.handlings {
		if o := &g.handlings[h]; o.end == 0 && o.cut == 0 {
			o.cut = i
		}
	}
	from, to := g.topic.between(c.low, c.high)
	for s := from; s < to; s++ {
		for h := g.state[s].open; h != 0; h = g.handlings[h-1].next {
			if o := &g.handlings[h-1]; o.cut == 0 && o.claim == n+1 {
				o.cut = i
			}
		}
	}
}

// sought begins a new epoch. What the group had neither reached nor finished
// at or below the new position is not asked for any more; but what it had
// left behind, claimed by nobody or acknowledged unhandled, still is.
func (j *judge) sought(g *group, i mark, e *Event) {
	g.rep.Seeks++
	_, to := g.topic.between(math.MinInt64, e.ID)
	for s := range g.state[:to] {
		st := &g.state[s]
		if st.flags&(wasHandled|wasDead|wasAcked|wasPassed) != 0 {
			continue
		}
		if st.claim != 0 || st.open != 0 || g.topic.slots[s].id > g.reached {
			st.flags |= wasPassed
		}
	}
	g.epoch++
	g.seek = i
	g.cursor = peaks{}
	g.reached = max(g.reached, e.ID)
}

func (j *judge) effect(g *group, i mark, e *Event) {
	k := g.topic.slot(e.ID)
	st, s := &g.state[k], &g.topic.slots[k]
	g.rep.Effects++
	st.effects++
	if st.ok != 0 && st.epoch == g.epoch && st.ack == 0 {
		st.ack = i
	}
	if !g.once {
		return
	}
	v := Violation{Kind: Effects, Topic: g.topic.name, Group: g.name, ID: e.ID}
	switch st.effects {
	case 1:
		g.firstEffect[k] = i
		if s.msg == 0 && g.topic.silent == 0 || s.msg != 0 && !j.messages[s.msg-1].maybeStored() {
			v.variant = 1
			j.breach(v, []mark{s.first, i}, "group %q has an effect of id %d, where nothing was stored", g.name, e.ID)
		}
	case 2:
		v.variant = 2
		j.breach(v, []mark{s.first, g.firstEffect[k], i}, "group %q has more than one effect of id %d", g.name, e.ID)
	}
}

// finish judges what can be told of a group only at the end.
func (j *judge) finish(g *group) {
	for s := range g.state {
		st, sl := &g.state[s], &g.topic.slots[s]
		if st.flags&wasPassed != 0 && st.flags&(wasHandled|wasDead) == 0 {
			g.rep.Passed++
		}
		if sl.msg == 0 {
			continue
		}
		m := &j.messages[sl.msg-1]
		if !m.isStored() {
			continue
		}
		excused := st.flags&(wasDead|wasPassed) != 0
		if g.complete && st.flags&wasHandled == 0 && !excused {
			g.rep.Lost++
			j.rep.Lost++
			j.breach(Violation{Kind: Lost, Topic: g.topic.name, Group: g.name, ID: sl.id, Value: m.value},
				[]mark{m.snap, m.produced, m.resolved},
				"group %q never handled value %q at id %d of topic %q", g.name, m.value, sl.id, g.topic.name)
		}
		if g.once && st.effects == 0 && !excused {
			j.breach(Violation{Kind: Effects, Topic: g.topic.name, Group: g.name, ID: sl.id},
				[]mark{m.produced, m.resolved}, "group %q has no effect of value %q at id %d", g.name, m.value, sl.id)
		}
	}
	for i := range g.handlings {
		if g.handlings[i].end == 0 {
			g.rep.Unfinished++
		}
	}
	j.overlaps(g)
	if g.ordered {
		j.concurrency(g)
		j.rewinds(g)
	}
}

// rewinds judges that whoever went back to an earlier message of a key went
// on from there: the last good handlings of a key's messages are in id order.
func (j *judge) rewinds(g *group) {
	for _, line := range g.topic.keys {
		latest := int32(-1)
		for _, s := range line {
			st := &g.state[s]
			if st.last == 0 {
				continue
			}
			if latest >= 0 && g.state[latest].epoch == st.epoch && j.before(st.last, g.state[latest].last) {
				id, other := g.topic.slots[s].id, g.topic.slots[latest].id
				j.breach(Violation{Kind: Order, Topic: g.topic.name, Group: g.name, ID: id, variant: -other},
					[]mark{st.last, g.state[latest].last},
					"group %q handled id %d again and id %d, which follows it in its key, not again", g.name, other, id)
				continue
			}
			latest = s
		}
	}
}

// lease returns the claim of a lease, which is a new one if the record does
// not have it.
func (g *group) lease(name string) int32 {
	n, ok := g.byLease[name]
	if !ok {
		n = int32(len(g.claims))
		g.claims = append(g.claims, claim{epoch: g.epoch})
		g.byLease[name] = n
	}
	return n
}

// overlaps judges that the first claims of each epoch are disjoint.
func (j *judge) overlaps(g *group) {
	var fresh []*claim
	for i := range g.claims {
		if c := &g.claims[i]; c.fresh && c.high > c.low {
			fresh = append(fresh, c)
		}
	}
	slices.SortFunc(fresh, func(a, b *claim) int {
		return cmp.Or(cmp.Compare(a.epoch, b.epoch), cmp.Compare(a.low, b.low), cmp.Compare(a.at, b.at))
	})
	var top *claim
	for _, c := range fresh {
		if top != nil && top.epoch == c.epoch && c.low < top.high {
			a, b := j.ev(top.at), j.ev(c.at)
			j.breach(Violation{Kind: Overlap, Topic: g.topic.name, Group: g.name, ID: c.low, Lease: b.By}, []mark{top.at, c.at},
				"group %q claimed (%d,%d] as lease %s and (%d,%d] as lease %s, both for the first time",
				g.name, a.Low, a.High, a.By, b.Low, b.High, b.By)
		}
		if top == nil || top.epoch != c.epoch || c.high > top.high {
			top = c
		}
	}
}

// concurrency judges that no two handlings of a key overlap. A handling
// counts until it ended or its lease was lost: no log can stop a handler that
// does not know yet. One whose end is not recorded is taken for crashed at
// once, as nothing tells how long it lasted; but where its lease is recorded,
// nobody is to have the key before that is lost.
func (j *judge) concurrency(g *group) {
	until := func(h *handling) mark {
		switch {
		case h.end == 0 && !(h.leased && h.cut != 0):
			return h.start
		case h.cut != 0:
			return h.cut
		}
		return h.end
	}
	latest := make([]int32, len(g.topic.keys)) // the handling that lasts longest so far, plus 1
	for i := range g.handlings {
		h := &g.handlings[i]
		key := g.topic.slots[h.slot].key
		if key == 0 || h.stray {
			continue
		}
		l := &latest[key-1]
		if *l != 0 {
			o := &g.handlings[*l-1]
			if j.before(h.start, until(o)) {
				id, other := g.topic.slots[h.slot].id, g.topic.slots[o.slot].id
				j.breach(Violation{Kind: Concurrency, Topic: g.topic.name, Group: g.name, ID: id, variant: other},
					[]mark{o.start, o.end, h.start, h.end},
					"group %q handled ids %d and %d of one key at the same time", g.name, other, id)
			}
			if until(h) <= until(o) {
				continue
			}
		}
		*l = int32(i) + 1
	}
}
