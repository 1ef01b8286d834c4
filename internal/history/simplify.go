package history

import (
	"slices"
	"strconv"
)

// Around returns the events that tell what happened to the messages of a
// violation: their production and handling, and the claims, acknowledgements
// and losses of the leases that held them. It is a selection for readers.
func Around(events []Event, o Options, v Violation) []Event {
	x := newIndex(events, o)
	var around []Event
	for i, in := range x.around(v) {
		if in {
			around = append(around, x.events[i])
		}
	}
	return around
}

// Simplify shrinks a history with a violation to a small one in which that
// same violation still occurs, leaving out first whole keys and leases, then
// values, then single events. The first violation that Judge reports is the
// one that is kept. A history without a violation gives nil.
func Simplify(events []Event, o Options) []Event {
	x := newIndex(events, o)
	rep := Judge(x.events, o)
	if rep.OK() {
		return nil
	}
	v := rep.Violations[0]
	want := v.identity()
	o.Topics = x.topics

	// Reduction by trial can take quadratic time; what it judges in all is
	// bounded, and it stops with what it has.
	budget := 20_000_000 + 4*len(x.events)
	var sub []Event
	occurs := func(keep []int32) bool {
		if budget -= len(keep); budget < 0 {
			return false
		}
		sub = sub[:0]
		for _, i := range keep {
			sub = append(sub, x.events[i])
		}
		j := newJudge(sub, o)
		j.want = &want
		j.run()
		return j.hit
	}

	// A violation hardly ever depends on more than what happened to its own
	// messages, so that is tried before anything else.
	var keep, all []int32
	for i, in := range x.around(v) {
		all = append(all, int32(i))
		if in {
			keep = append(keep, int32(i))
		}
	}
	if !occurs(keep) {
		keep = all
	}
	for _, unit := range []func(i int32) string{
		func(i int32) string { return x.unit(i, true) },
		func(i int32) string { return x.unit(i, false) },
		func(i int32) string { return strconv.Itoa(int(i)) },
	} {
		keep = reduce(split(keep, unit), occurs)
	}
	small := make([]Event, 0, len(keep))
	for _, i := range keep {
		small = append(small, x.events[i])
	}
	return small
}

// split groups indexes by the unit they belong to, in order of appearance.
func split(keep []int32, unit func(int32) string) [][]int32 {
	var units [][]int32
	at := map[string]int{}
	for _, i := range keep {
		name := unit(i)
		n, ok := at[name]
		if !ok {
			n = len(units)
			at[name] = n
			units = append(units, nil)
		}
		units[n] = append(units[n], i)
	}
	return units
}

// reduce leaves out units, in runs that become shorter, as long as the
// violation occurs without them. It returns what is left.
func reduce(units [][]int32, occurs func([]int32) bool) []int32 {
	flat := func(parts ...[][]int32) []int32 {
		var keep []int32
		for _, p := range parts {
			for _, u := range p {
				keep = append(keep, u...)
			}
		}
		slices.Sort(keep)
		return keep
	}
	for n := 2; len(units) > 1; {
		size := (len(units) + n - 1) / n
		shrunk := false
		for from := 0; from < len(units) && len(units) > 1; {
			to := min(from+size, len(units))
			if occurs(flat(units[:from], units[to:])) {
				units = slices.Delete(units, from, to)
				shrunk = true
				continue
			}
			from = to
		}
		switch {
		case shrunk:
			n = max(2, min(n, len(units)))
		case size == 1:
			return flat(units)
		default:
			n = min(2*n, len(units))
		}
	}
	return flat(units)
}

// index tells which messages and leases the events of a history are about.
type index struct {
	events []Event
	topics map[string]string // by group
	keys   map[string]string // by value
	values map[place]string
}

type place struct {
	topic string
	id    int64
}

func newIndex(events []Event, o Options) *index {
	if !inOrder(events) {
		events = Merge(events)
	}
	x := &index{events: events, topics: map[string]string{}, keys: map[string]string{}, values: map[place]string{}}
	j := newJudge(events, o)
	// Preparing reports violations as well, which are of no interest here.
	j.want = &identity{}
	j.prepare()
	for _, g := range j.groupList {
		if j.topics[g.topic.name] == g.topic {
			x.topics[g.name] = g.topic.name
		}
	}
	for i := range j.messages {
		x.keys[j.messages[i].value] = j.messages[i].key
	}
	for _, t := range j.topicList {
		for _, s := range t.slots {
			if s.msg != 0 {
				x.values[place{t.name, s.id}] = j.messages[s.msg-1].value
			}
		}
	}
	return x
}

// value returns the value of the message an event is about.
func (x *index) value(e *Event) (string, bool) {
	switch e.Kind {
	case KindProduceStarted, KindCommitting, KindProduced, KindProduceFailed, KindProduceUnknown, KindResolved,
		KindHandleStarted:
		return e.Value, true
	case KindHandleEnded, KindDead, KindEffect:
		v, ok := x.values[place{x.topics[e.Group], e.ID}]
		return v, ok
	}
	return "", false
}

func isLeaseEvent(k Kind) bool { return k == KindClaimed || k == KindAcked || k == KindLeaseLost }

// unit names what an event stands or falls with: its message, or all messages
// of the same key; its lease; or nothing else.
func (x *index) unit(i int32, byKey bool) string {
	e := &x.events[i]
	if v, ok := x.value(e); ok {
		if key := x.keys[v]; byKey && key != "" {
			return "key " + key
		}
		return "value " + v
	}
	if isLeaseEvent(e.Kind) {
		return "lease " + strconv.Quote(e.Group) + e.By
	}
	return strconv.Itoa(int(i))
}

// around selects the events of the messages and leases of a violation.
func (x *index) around(v Violation) []bool {
	in := make([]bool, len(x.events))
	values, leases := map[string]bool{}, map[[2]string]bool{}
	ids := map[int64]bool{}
	exact := map[[2]int64]bool{}
	for i := range v.Events {
		e := &v.Events[i]
		exact[[2]int64{int64(e.Proc), e.Seq}] = true
		if isLeaseEvent(e.Kind) {
			leases[[2]string{e.Group, e.By}] = true
		} else if e.Lease != "" {
			leases[[2]string{e.Group, e.Lease}] = true
		}
		if val, ok := x.value(e); ok {
			values[val] = true
		}
		switch e.Kind {
		case KindProduced, KindHandleStarted, KindHandleEnded, KindEffect, KindDead:
			ids[e.ID] = true
		case KindResolved:
			if e.OK {
				ids[e.ID] = true
			}
		}
	}
	if v.Group != "" {
		for i := range x.events {
			e := &x.events[i]
			if e.Kind != KindClaimed || e.Group != v.Group {
				continue
			}
			for id := range ids {
				if e.Low < id && id <= e.High {
					leases[[2]string{e.Group, e.By}] = true
				}
			}
		}
	}
	for i := range x.events {
		e := &x.events[i]
		// Without sequence numbers a violation's own events are not told
		// apart this way; their messages and leases still are.
		in[i] = e.Seq != 0 && exact[[2]int64{int64(e.Proc), e.Seq}]
		if isLeaseEvent(e.Kind) {
			in[i] = in[i] || leases[[2]string{e.Group, e.By}]
		} else if val, ok := x.value(e); ok && values[val] {
			in[i] = in[i] || e.Group == "" || v.Group == "" || e.Group == v.Group
		}
		if e.Kind == KindSeek && e.Group == v.Group && v.Group != "" {
			in[i] = true
		}
	}
	return in
}
