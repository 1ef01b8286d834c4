// Package history records what was produced to and handled from a message
// log with consumer groups, from many goroutines and processes, and judges
// whether the record is one a correct log could have left behind.
//
// It knows nothing of how a log works. Its vocabulary is: a topic holds
// messages; a message has a position id, perhaps a key, and a value that the
// caller chose and used for no other message; a group takes ids (low, high]
// by a claim that it holds under a lease, and each claim of the same ids is
// another attempt; the settled head of a topic is the bound at or below which
// nothing new may appear.
//
// A group reads one topic. A test whose groups read several records each pair
// under a name of its own.
//
// The judge has only the order of recording to go by. An event that begins
// something must be recorded before the thing is begun and an event that
// reports something after it was observed; then every "before" the judge
// relies on is a true one.
package history

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
)

// Kind says what an Event reports.
type Kind uint8

// The kinds of events. Each is recorded by the Recorder method of its name.
const (
	KindProduceStarted Kind = iota + 1
	KindCommitting
	KindProduced
	KindProduceFailed
	KindProduceUnknown
	KindResolved
	KindClaimed
	KindHandleStarted
	KindHandleEnded
	KindAcked
	KindLeaseLost
	KindDead
	KindSettled
	KindCursorAt
	KindSeek
	KindEffect
	KindRestarted
	KindFault
)

var kindNames = [...]string{
	KindProduceStarted: "ProduceStarted",
	KindCommitting:     "Committing",
	KindProduced:       "Produced",
	KindProduceFailed:  "ProduceFailed",
	KindProduceUnknown: "ProduceUnknown",
	KindResolved:       "Resolved",
	KindClaimed:        "Claimed",
	KindHandleStarted:  "HandleStarted",
	KindHandleEnded:    "HandleEnded",
	KindAcked:          "Acked",
	KindLeaseLost:      "LeaseLost",
	KindDead:           "Dead",
	KindSettled:        "Settled",
	KindCursorAt:       "CursorAt",
	KindSeek:           "Seek",
	KindEffect:         "Effect",
	KindRestarted:      "Restarted",
	KindFault:          "Fault",
}

// String returns the name of the kind.
func (k Kind) String() string {
	if int(k) < len(kindNames) && kindNames[k] != "" {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// MarshalText writes the kind by name, so that files stay readable and
// survive a change of the numbering.
func (k Kind) MarshalText() ([]byte, error) {
	if int(k) >= len(kindNames) || kindNames[k] == "" {
		return nil, fmt.Errorf("history: no such event kind: %d", uint8(k))
	}
	return []byte(kindNames[k]), nil
}

// UnmarshalText reads a kind by name.
func (k *Kind) UnmarshalText(text []byte) error {
	for i, name := range kindNames {
		if name != "" && name == string(text) {
			*k = Kind(i)
			return nil
		}
	}
	return fmt.Errorf("history: no such event kind: %q", text)
}

// Event is one thing that was done or seen. Which fields carry a meaning
// depends on its Kind; the others are zero.
type Event struct {
	Kind Kind `json:"kind"`
	// OK is the ok of HandleEnded, the accepted of Acked, the stored of Resolved.
	OK bool `json:"ok,omitempty"`
	// Proc is the number of the process that recorded the event.
	Proc int32 `json:"proc,omitempty"`
	// Attempt counts the deliveries of the same ids, from 1.
	Attempt int32 `json:"attempt,omitempty"`
	// Time is in nanoseconds since the base all processes of a test share.
	Time int64 `json:"time"`
	// Seq numbers the events of one process in the order of recording.
	Seq int64 `json:"seq"`
	// Began is when an observation (Settled, CursorAt) began; zero if unknown.
	Began int64 `json:"began,omitempty"`
	// ID is a message's position; for Settled the head, for CursorAt and Seek
	// the group's position.
	ID int64 `json:"id,omitempty"`
	// Low and High bound a claim: it holds the ids above Low up to High.
	Low   int64  `json:"low,omitempty"`
	High  int64  `json:"high,omitempty"`
	Topic string `json:"topic,omitempty"`
	Group string `json:"group,omitempty"`
	// By is the lease of Claimed, Acked and LeaseLost, and the consumer of
	// HandleStarted and HandleEnded.
	By string `json:"by,omitempty"`
	// Lease is the lease under which a message is handled, of HandleStarted and
	// HandleEnded; empty if the record does not tell. It is what its consumer
	// held at that moment by the log's own word, not what it thought it held.
	Lease string `json:"lease,omitempty"`
	// Value is a message's value; for Fault it names the fault.
	Value string `json:"value,omitempty"`
	Key   string `json:"key,omitempty"`
}

// String returns the event on one line for a reader.
func (e Event) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%12.3fms p%d#%d %s", float64(e.Time)/1e6, e.Proc, e.Seq, e.Kind)
	text := func(name, s string) {
		if s != "" {
			fmt.Fprintf(&b, " %s=%s", name, s)
		}
	}
	text("topic", e.Topic)
	text("group", e.Group)
	switch e.Kind {
	case KindClaimed:
		fmt.Fprintf(&b, " lease=%s (%d,%d] attempt=%d", e.By, e.Low, e.High, e.Attempt)
	case KindAcked:
		fmt.Fprintf(&b, " lease=%s accepted=%t", e.By, e.OK)
	case KindLeaseLost:
		text("lease", e.By)
	case KindHandleStarted:
		text("consumer", e.By)
		fmt.Fprintf(&b, " id=%d attempt=%d", e.ID, e.Attempt)
		text("lease", e.Lease)
	case KindHandleEnded:
		text("consumer", e.By)
		fmt.Fprintf(&b, " id=%d ok=%t", e.ID, e.OK)
		text("lease", e.Lease)
	case KindResolved:
		fmt.Fprintf(&b, " stored=%t", e.OK)
		if e.OK {
			fmt.Fprintf(&b, " id=%d", e.ID)
		}
	case KindProduced, KindDead, KindEffect:
		fmt.Fprintf(&b, " id=%d", e.ID)
	case KindSettled:
		fmt.Fprintf(&b, " head=%d", e.ID)
	case KindCursorAt, KindSeek:
		fmt.Fprintf(&b, " position=%d", e.ID)
	}
	text("value", e.Value)
	text("key", e.Key)
	return b.String()
}

// chunk is how many events a Recorder stores in one piece. Growing by pieces
// keeps a long record from being copied while everyone waits for the lock.
const chunk = 8192

// Recorder collects the events of one process. It is safe for concurrent use.
type Recorder struct {
	base   int64
	proc   int32
	offset int64
	start  time.Time

	mu     sync.Mutex
	seq    int64
	full   [][]Event
	last   []Event
	stream io.Writer
	err    error
}

// New returns the recorder of the process that starts a test. Its process
// number is 0 and its base is now.
func New() *Recorder { return Join(time.Now().UnixNano(), 0) }

// Join returns a recorder for another process of the test whose base, in
// nanoseconds of the wall clock, is given. Each process needs a proc number
// of its own.
func Join(base int64, proc int32) *Recorder {
	now := time.Now()
	// The wall clock is read once: from here on only the monotonic clock
	// counts, so that a step of the wall clock cannot reorder the record.
	return &Recorder{base: base, proc: proc, offset: now.UnixNano() - base, start: now}
}

// Base returns the base to hand to Join in other processes.
func (r *Recorder) Base() int64 { return r.base }

// Now returns the present time as events carry it. It is never zero.
func (r *Recorder) Now() int64 { return max(1, r.offset+int64(time.Since(r.start))) }

// Stream makes the recorder also write each further event to w at once, as a
// line of JSON. A process that may be killed uses it with a file: what it
// recorded until then survives. Err tells of a failed write.
func (r *Recorder) Stream(w io.Writer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stream = w
}

// Err returns the first error of writing to the stream.
func (r *Recorder) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// Add records an event; its Time, Seq and Proc are set by the recorder.
func (r *Recorder) Add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	// Taking the time under the lock makes the order of times and the order
	// of sequence numbers the same one.
	r.seq++
	e.Seq, e.Proc, e.Time = r.seq, r.proc, r.Now()
	if len(r.last) == chunk {
		r.full = append(r.full, r.last)
		r.last = make([]Event, 0, chunk)
	}
	r.last = append(r.last, e)
	if r.stream == nil || r.err != nil {
		return
	}
	line, err := json.Marshal(&e)
	if err == nil {
		_, err = r.stream.Write(append(line, '\n'))
	}
	r.err = err
}

// Len returns how many events were recorded.
func (r *Recorder) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.full)*chunk + len(r.last)
}

// Events returns a copy of what was recorded so far, in order.
func (r *Recorder) Events() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Event, 0, len(r.full)*chunk+len(r.last))
	for _, c := range r.full {
		all = append(all, c...)
	}
	return append(all, r.last...)
}

// Write writes what was recorded so far as lines of JSON.
func (r *Recorder) Write(w io.Writer) error { return Write(w, r.Events()) }

// ProduceStarted records that a message is about to be produced.
func (r *Recorder) ProduceStarted(topic, value, key string) {
	r.Add(Event{Kind: KindProduceStarted, Topic: topic, Value: value, Key: key})
}

// Committing records that the commit which stores a message is about to
// begin; it comes after ProduceStarted. Without it the judge takes ProduceStarted in its place, which is
// sound but sees fewer skips.
func (r *Recorder) Committing(value string) {
	r.Add(Event{Kind: KindCommitting, Value: value})
}

// Produced records that a message was stored at id and acknowledged.
func (r *Recorder) Produced(topic string, id int64, value, key string) {
	r.Add(Event{Kind: KindProduced, Topic: topic, ID: id, Value: value, Key: key})
}

// ProduceFailed records that a message was certainly not stored.
func (r *Recorder) ProduceFailed(value string) {
	r.Add(Event{Kind: KindProduceFailed, Value: value})
}

// ProduceUnknown records that nobody knows whether a message was stored.
func (r *Recorder) ProduceUnknown(value string) {
	r.Add(Event{Kind: KindProduceUnknown, Value: value})
}

// Resolved records what became of a message whose outcome was unknown; id
// counts only if it was stored. The topic is the one of ProduceStarted.
func (r *Recorder) Resolved(value string, stored bool, id int64) {
	r.Add(Event{Kind: KindResolved, Value: value, OK: stored, ID: id})
}

// Claimed records that a group took the ids (low, high] under a lease.
// Attempt is 1 for ids that no claim held before.
func (r *Recorder) Claimed(group, lease string, low, high int64, attempt int) {
	r.Add(Event{Kind: KindClaimed, Group: group, By: lease, Low: low, High: high, Attempt: int32(attempt)})
}

// HandleStarted records that a consumer is about to handle a message.
func (r *Recorder) HandleStarted(group, consumer string, id int64, value, key string, attempt int) {
	r.Add(Event{Kind: KindHandleStarted, Group: group, By: consumer, ID: id, Value: value, Key: key, Attempt: int32(attempt)})
}

// HandleEnded records that the consumer's handling of a message is over.
func (r *Recorder) HandleEnded(group, consumer string, id int64, ok bool) {
	r.Add(Event{Kind: KindHandleEnded, Group: group, By: consumer, ID: id, OK: ok})
}

// HandleStartedUnder is HandleStarted where the lease that the message is
// handled under is known. Such a handling counts while that lease is not
// reported lost, and no longer: see Judge.
func (r *Recorder) HandleStartedUnder(group, consumer, lease string, id int64, value, key string, attempt int) {
	r.Add(Event{
		Kind: KindHandleStarted, Group: group, By: consumer, Lease: lease, ID: id, Value: value, Key: key, Attempt: int32(attempt),
	})
}

// HandleEndedUnder records the end of what HandleStartedUnder began.
func (r *Recorder) HandleEndedUnder(group, consumer, lease string, id int64, ok bool) {
	r.Add(Event{Kind: KindHandleEnded, Group: group, By: consumer, Lease: lease, ID: id, OK: ok})
}

// Acked records the answer to an acknowledgement of all that a lease holds.
// Which messages it covers is known from the Claimed of that lease.
func (r *Recorder) Acked(group, lease string, accepted bool) {
	r.Add(Event{Kind: KindAcked, Group: group, By: lease, OK: accepted})
}

// LeaseLost records that a lease expired or was taken over.
func (r *Recorder) LeaseLost(group, lease string) {
	r.Add(Event{Kind: KindLeaseLost, Group: group, By: lease})
}

// Dead records that a group gave up on a message.
func (r *Recorder) Dead(group string, id int64) {
	r.Add(Event{Kind: KindDead, Group: group, ID: id})
}

// Settled records an observation of a topic's settled head. Observations of
// one topic recorded this way must not overlap; see SettledSince.
func (r *Recorder) Settled(topic string, head int64) { r.SettledSince(0, topic, head) }

// SettledSince is Settled for observers that run side by side: began is the
// recorder's Now from before the look. Two looks that overlap may be recorded
// in either order, and only the beginning tells that from a fall.
func (r *Recorder) SettledSince(began int64, topic string, head int64) {
	r.Add(Event{Kind: KindSettled, Began: began, Topic: topic, ID: head})
}

// CursorAt records an observation of a group's position. Observations of one
// group recorded this way must not overlap; see CursorAtSince.
func (r *Recorder) CursorAt(group string, position int64) { r.CursorAtSince(0, group, position) }

// CursorAtSince is CursorAt for observers that run side by side; began is the
// recorder's Now from before the look.
func (r *Recorder) CursorAtSince(began int64, group string, position int64) {
	r.Add(Event{Kind: KindCursorAt, Began: began, Group: group, ID: position})
}

// Seek records that a group was moved to a position. It is best recorded
// while the group is at rest; around a running group, record it both before
// and after the move, so that what crosses the move is not held against it.
func (r *Recorder) Seek(group string, position int64) {
	r.Add(Event{Kind: KindSeek, Group: group, ID: position})
}

// Effect records a committed effect of an effectively-once handler. It
// acknowledges the message.
func (r *Recorder) Effect(group string, id int64) {
	r.Add(Event{Kind: KindEffect, Group: group, ID: id})
}

// Restarted records that the log's server is up again after a crash, which may
// have lost what was committed without waiting for the disk: settled heads and
// positions may stand lower than they were seen before.
func (r *Recorder) Restarted() { r.Add(Event{Kind: KindRestarted}) }

// Fault notes that a fault was injected. It is not judged.
func (r *Recorder) Fault(kind string) { r.Add(Event{Kind: KindFault, Value: kind}) }

// Write writes events as lines of JSON.
func Write(w io.Writer, events []Event) error {
	b := bufio.NewWriterSize(w, 1<<16)
	enc := json.NewEncoder(b)
	enc.SetEscapeHTML(false)
	for i := range events {
		if err := enc.Encode(&events[i]); err != nil {
			return err
		}
	}
	return b.Flush()
}

// Read reads what Write or a stream wrote. A last line without its end is
// left out: it is what a process leaves that is killed while it writes.
func Read(r io.Reader) ([]Event, error) {
	b := bufio.NewReaderSize(r, 1<<16)
	var events []Event
	var long []byte
	for n := 1; ; {
		line, err := b.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			long = append(long, line...)
			continue
		}
		if err == io.EOF {
			return events, nil
		}
		if err != nil {
			return nil, err
		}
		if len(long) > 0 {
			long = append(long, line...)
			line = long
		}
		if len(bytes.TrimSpace(line)) > 0 {
			var e Event
			if err := json.Unmarshal(line, &e); err != nil {
				return nil, fmt.Errorf("history: line %d: %w", n, err)
			}
			events = append(events, e)
		}
		long = long[:0]
		n++
	}
}

// Merge joins the events of several processes into one record, in order.
func Merge(parts ...[]Event) []Event {
	all := slices.Concat(parts...)
	slices.SortFunc(all, compare)
	return all
}

func compare(a, b Event) int { return order(&a, &b) }

func order(a, b *Event) int {
	if a.Time != b.Time {
		return cmp.Compare(a.Time, b.Time)
	}
	return cmp.Or(cmp.Compare(a.Proc, b.Proc), cmp.Compare(a.Seq, b.Seq))
}
