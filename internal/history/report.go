package history

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Rule names what a correct log never does.
type Rule string

// The rules a history is judged by.
const (
	// Lost: a message was stored, and a group that must be complete neither
	// handled it well nor gave it up.
	Lost Rule = "lost"
	// Phantom: a group handled a value that was never produced, that was
	// certainly not stored, or whose production had not begun yet.
	Phantom Rule = "phantom"
	// Duplicate: a message was handled well again although a handling of it
	// had been acknowledged before the later one started, or under the same
	// lease.
	Duplicate Rule = "duplicate"
	// Overlap: two first claims of a group share ids.
	Overlap Rule = "overlap"
	// Skip: a message appeared at or below a settled head that had been
	// observed before its commit began.
	Skip Rule = "skip"
	// Fall: a settled head, or a group's position without a seek, went down.
	Fall Rule = "fall"
	// Order: an ordered group started a message before an earlier one of the
	// same key was done; or went back to an earlier one and did not handle
	// again what follows it.
	Order Rule = "order"
	// Concurrency: an ordered group handled two messages of a key at once.
	Concurrency Rule = "concurrency"
	// TwoContents: one id was seen with two values or two keys.
	TwoContents Rule = "two contents"
	// TwoPlaces: one value was seen at two ids.
	TwoPlaces Rule = "two places"
	// LateAck: an acknowledgement was accepted after its lease was lost.
	LateAck Rule = "late ack"
	// Effects: a message did not have exactly one effect.
	Effects Rule = "effects"
	// Setup: the history cannot be judged as asked.
	Setup Rule = "setup"
)

// Options say what to expect of a history.
type Options struct {
	// Groups must be complete: whatever was stored they handled or gave up.
	Groups []string
	// OrderedGroups handle the messages of a key one at a time, by id.
	OrderedGroups []string
	// EffectOnceGroups leave exactly one effect of each stored message; at
	// most one if the message is dead or a seek passed over it.
	EffectOnceGroups []string
	// AllowDuplicates accepts that a message is handled well again even after
	// it was acknowledged. Repeats are still counted.
	AllowDuplicates bool
	// NoRedelivery takes every second good handling of a message for a
	// duplicate, acknowledged or not. It suits runs without faults.
	NoRedelivery bool
	// Topics tells which topic a group reads. It is needed only when there are
	// several topics and the group handled nothing.
	Topics map[string]string
	// Slack is how far the clocks of two processes may be apart. Events of
	// different processes that are closer count as neither before the other.
	Slack time.Duration
	// Keep limits how many violations of each rule are reported in full; all
	// are counted. Zero means 100.
	Keep int
}

// Violation is one breach of a rule. Of the fields that name what it is
// about, those that do not apply are zero.
type Violation struct {
	Kind    Rule    `json:"kind"`
	Message string  `json:"message"`
	Topic   string  `json:"topic,omitempty"`
	Group   string  `json:"group,omitempty"`
	ID      int64   `json:"id,omitempty"`
	Value   string  `json:"value,omitempty"`
	Lease   string  `json:"lease,omitempty"`
	Events  []Event `json:"events,omitempty"`

	// variant sets apart violations that are alike in all else but came
	// about differently, lest simplifying turns one into the other.
	variant int64
}

// String returns the violation and its events for a reader.
func (v Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", v.Kind, v.Message)
	for _, e := range v.Events {
		b.WriteString("\n    ")
		b.WriteString(e.String())
	}
	return b.String()
}

// GroupReport counts what one group did.
type GroupReport struct {
	Topic string `json:"topic"`
	// Claims counts claims, Reclaimed those of a later attempt.
	Claims    int `json:"claims"`
	Reclaimed int `json:"reclaimed"`
	// Started counts handlings begun, Handled those that ended well, Failed
	// those that ended badly, Unfinished those whose end is not recorded.
	Started    int `json:"started"`
	Handled    int `json:"handled"`
	Failed     int `json:"failed"`
	Unfinished int `json:"unfinished"`
	// Distinct counts messages handled well at least once.
	Distinct int `json:"distinct"`
	// Redelivered counts handlings of a message begun after its first.
	Redelivered int `json:"redelivered"`
	// Duplicates counts good handlings of a message after its first good one.
	Duplicates int `json:"duplicates"`
	Acked      int `json:"acked"`
	Rejected   int `json:"rejected"`
	LeasesLost int `json:"leases_lost"`
	// Strays counts handlings that began, or ended well, after their lease was
	// lost: a log cannot stop a handler that does not know yet.
	Strays int `json:"strays"`
	Dead   int `json:"dead"`
	// Passed counts unhandled messages that a seek passed over.
	Passed  int `json:"passed"`
	Lost    int `json:"lost"`
	Effects int `json:"effects"`
	Seeks   int `json:"seeks"`
}

// Report is the judgement of a history.
type Report struct {
	Events int `json:"events"`
	// Produced counts values acknowledged as stored, Stored these and the
	// unknown ones resolved as stored.
	Produced int `json:"produced"`
	Stored   int `json:"stored"`
	// Failed counts values certainly not stored, Unresolved those of which
	// the history does not tell.
	Failed     int                     `json:"failed"`
	Unresolved int                     `json:"unresolved"`
	Lost       int                     `json:"lost"`
	Groups     map[string]*GroupReport `json:"groups"`
	Faults     map[string]int          `json:"faults,omitempty"`
	// Violated counts all violations by rule; Violations holds the first of
	// each rule, as many as Options.Keep allows.
	Violated   map[Rule]int `json:"violated,omitempty"`
	Violations []Violation  `json:"violations,omitempty"`
}

// OK tells whether nothing was violated.
func (r Report) OK() bool { return len(r.Violated) == 0 }

// String returns a short summary for a reader.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d events: %d produced, %d stored, %d failed, %d unresolved",
		r.Events, r.Produced, r.Stored, r.Failed, r.Unresolved)
	some := func(name string, n int) {
		if n > 0 {
			fmt.Fprintf(&b, ", %d %s", n, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Groups)) {
		g := r.Groups[name]
		fmt.Fprintf(&b, "\n  group %s: %d messages handled", name, g.Distinct)
		some("handlings", g.Started)
		some("failed", g.Failed)
		some("unfinished", g.Unfinished)
		some("redelivered", g.Redelivered)
		some("duplicates", g.Duplicates)
		some("acks rejected", g.Rejected)
		some("leases lost", g.LeasesLost)
		some("strays", g.Strays)
		some("dead", g.Dead)
		some("passed over", g.Passed)
		some("effects", g.Effects)
		some("lost", g.Lost)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Faults)) {
		fmt.Fprintf(&b, "\n  fault %s: %d", name, r.Faults[name])
	}
	if r.OK() {
		b.WriteString("\n  no violations")
		return b.String()
	}
	b.WriteString("\n  VIOLATED:")
	for _, k := range slices.Sorted(maps.Keys(r.Violated)) {
		fmt.Fprintf(&b, " %s %d;", k, r.Violated[k])
	}
	// A few of each rule tell more than many of the most frequent one.
	const few = 3
	shown := map[Rule]int{}
	for _, v := range r.Violations {
		if shown[v.Kind]++; shown[v.Kind] <= few {
			b.WriteString("\n  ")
			b.WriteString(v.String())
		}
	}
	return b.String()
}
