package history

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// script is a Recorder with shorthands for one topic "t" and a group "g".
type script struct{ *Recorder }

func (s script) produce(id int64, value, key string) {
	s.ProduceStarted("t", value, key)
	s.Committing(value)
	s.Produced("t", id, value, key)
}

func (s script) start(id int64, value, key string) { s.HandleStarted("g", "c", id, value, key, 1) }
func (s script) end(id int64)                      { s.HandleEnded("g", "c", id, true) }
func (s script) handle(id int64, value, key string) {
	s.start(id, value, key)
	s.end(id)
}

// run claims, handles and acknowledges one message.
func (s script) run(id int64, value, key, lease string) {
	s.Claimed("g", lease, id-1, id, 1)
	s.handle(id, value, key)
	s.Acked("g", lease, true)
}

func (s script) startUnder(lease string, id int64, value, key string) {
	s.HandleStartedUnder("g", "c", lease, id, value, key, 1)
}
func (s script) endUnder(lease string, id int64) { s.HandleEndedUnder("g", "c", lease, id, true) }
func (s script) handleUnder(lease string, id int64, value, key string) {
	s.startUnder(lease, id, value, key)
	s.endUnder(lease, id)
}

func record(f func(script)) []Event {
	s := script{New()}
	f(s)
	return s.Events()
}

func TestRules(t *testing.T) {
	all := Options{Groups: []string{"g"}}
	ordered := Options{OrderedGroups: []string{"g"}}
	once := Options{EffectOnceGroups: []string{"g"}}
	tests := []struct {
		name      string
		kind      Rule
		o         Options
		bad, good func(script)
	}{
		{"lost", Lost, all, func(s script) {
			s.produce(1, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.run(1, "a", "", "l1")
		}},
		{"lost although tried", Lost, all, func(s script) {
			s.produce(1, "a", "")
			s.start(1, "a", "")
			s.HandleEnded("g", "c", 1, false)
		}, func(s script) {
			s.produce(1, "a", "")
			s.start(1, "a", "")
			s.HandleEnded("g", "c", 1, false)
			s.Dead("g", 1)
		}},
		{"lost after unknown outcome", Lost, all, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.ProduceUnknown("a")
			s.Resolved("a", true, 1)
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.ProduceUnknown("a")
			s.Resolved("a", false, 0)
			s.ProduceStarted("t", "b", "")
			s.ProduceUnknown("b")
		}},
		{"lost behind a seek back", Lost, all, func(s script) {
			s.produce(1, "a", "")
			s.produce(2, "b", "")
			s.run(2, "b", "", "l1")
			s.Seek("g", 1)
			s.run(2, "b", "", "l2")
		}, func(s script) {
			s.produce(1, "a", "")
			s.produce(2, "b", "")
			s.Claimed("g", "l0", 0, 1, 1)
			s.run(2, "b", "", "l1")
			s.Seek("g", 1)
			s.run(2, "b", "", "l2")
		}},
		{"lost beyond a seek ahead", Lost, all, func(s script) {
			s.produce(1, "a", "")
			s.produce(2, "b", "")
			s.Seek("g", 1)
		}, func(s script) {
			s.produce(1, "a", "")
			s.produce(2, "b", "")
			s.Seek("g", 2)
		}},
		{"phantom never produced", Phantom, all, func(s script) {
			s.run(1, "a", "", "l1")
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.run(1, "a", "", "l1")
		}},
		{"phantom failed", Phantom, all, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.ProduceFailed("a")
			s.run(1, "a", "", "l1")
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.ProduceFailed("a")
			s.produce(1, "a", "")
			s.run(1, "a", "", "l1")
		}},
		{"phantom resolved", Phantom, all, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.ProduceUnknown("a")
			s.run(1, "a", "", "l1")
			s.Resolved("a", false, 0)
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.ProduceUnknown("a")
			s.run(1, "a", "", "l1")
			s.Resolved("a", true, 1)
		}},
		{"phantom from the future", Phantom, all, func(s script) {
			s.run(1, "a", "", "l1")
			s.produce(1, "a", "")
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.run(1, "a", "", "l1")
			s.Produced("t", 1, "a", "")
		}},
		{"duplicate", Duplicate, all, func(s script) {
			s.produce(1, "a", "")
			s.run(1, "a", "", "l1")
			s.handle(1, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.Claimed("g", "l1", 0, 1, 1)
			s.handle(1, "a", "")
			s.start(1, "a", "")
			s.Acked("g", "l1", true)
			s.end(1)
		}},
		{"duplicate after a rejected ack is none", Duplicate, all, func(s script) {
			s.produce(1, "a", "")
			s.Claimed("g", "l1", 0, 1, 1)
			s.handle(1, "a", "")
			s.Acked("g", "l1", true)
			s.Claimed("g", "l2", 0, 1, 2)
			s.handle(1, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.Claimed("g", "l1", 0, 1, 1)
			s.handle(1, "a", "")
			s.Acked("g", "l1", false)
			s.Claimed("g", "l2", 0, 1, 2)
			s.handle(1, "a", "")
			s.Acked("g", "l2", true)
			s.Seek("g", 0)
			s.run(1, "a", "", "l3")
		}},
		{"duplicate in a run without faults", Duplicate, Options{NoRedelivery: true}, func(s script) {
			s.produce(1, "a", "")
			s.handle(1, "a", "")
			s.handle(1, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.handle(1, "a", "")
			s.Seek("g", 0)
			s.handle(1, "a", "")
		}},
		{"overlap", Overlap, all, func(s script) {
			s.Claimed("g", "l1", 0, 10, 1)
			s.Claimed("g", "l2", 12, 20, 1)
			s.Claimed("g", "l3", 9, 12, 1)
		}, func(s script) {
			s.Claimed("g", "l1", 0, 10, 1)
			s.Claimed("g", "l2", 12, 20, 1)
			s.Claimed("g", "l3", 10, 12, 1)
			s.Claimed("g", "l4", 0, 10, 2)
			s.Claimed("h", "l1", 5, 15, 1)
			s.Seek("g", 0)
			s.Claimed("g", "l5", 0, 20, 1)
		}},
		{"skip", Skip, Options{}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.Settled("t", 5)
			s.Committing("a")
			s.Produced("t", 5, "a", "")
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.Committing("a")
			s.Settled("t", 5)
			s.Produced("t", 5, "a", "")
			s.produce(6, "b", "")
		}},
		{"skip without a commit event", Skip, Options{}, func(s script) {
			s.Settled("t", 5)
			s.ProduceStarted("t", "a", "")
			s.Produced("t", 5, "a", "")
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.Settled("t", 5)
			s.Produced("t", 5, "a", "")
		}},
		{"skip in a second attempt", Skip, Options{}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.Committing("a")
			s.ProduceFailed("a")
			s.Settled("t", 5)
			s.produce(5, "a", "")
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.Committing("a")
			s.ProduceUnknown("a")
			s.Settled("t", 5)
			s.produce(5, "a", "")
		}},
		{"skip seen by a group", Skip, Options{}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.Settled("t", 5)
			s.Committing("a")
			s.handle(5, "a", "")
		}, func(s script) {
			s.ProduceStarted("t", "a", "")
			s.Settled("t", 4)
			s.Committing("a")
			s.handle(5, "a", "")
		}},
		{"fall of a head", Fall, Options{}, func(s script) {
			s.Settled("t", 5)
			s.Settled("t", 4)
		}, func(s script) {
			s.Settled("t", 5)
			s.Settled("t", 5)
			s.Settled("u", 4)
		}},
		{"fall of a head seen from aside", Fall, Options{}, func(s script) {
			s.Settled("t", 5)
			s.SettledSince(later(s), "t", 4)
		}, func(s script) {
			began := s.Now()
			s.Settled("t", 5)
			s.SettledSince(began, "t", 4)
		}},
		{"fall of a position", Fall, Options{}, func(s script) {
			s.CursorAt("g", 5)
			s.Seek("h", 0)
			s.CursorAt("g", 4)
		}, func(s script) {
			s.CursorAt("g", 5)
			s.Seek("g", 0)
			s.CursorAt("g", 4)
		}},
		{"fall of a position after a seek", Fall, Options{}, func(s script) {
			s.Seek("g", 3)
			s.CursorAt("g", 3)
			s.CursorAtSince(later(s), "g", 2)
		}, func(s script) {
			began := s.Now()
			s.CursorAt("g", 3)
			s.Seek("g", 0)
			s.CursorAt("g", 0)
			s.CursorAtSince(began, "g", 3)
			s.CursorAt("g", 1)
		}},
		{"order", Order, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.handle(2, "b", "k")
			s.handle(1, "a", "k")
		}, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "l")
			s.produce(3, "c", "")
			s.handle(3, "c", "")
			s.handle(2, "b", "l")
			s.handle(1, "a", "k")
		}},
		{"order after a failure", Order, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.start(1, "a", "k")
			s.HandleEnded("g", "c", 1, false)
			s.handle(2, "b", "k")
			s.handle(1, "a", "k")
		}, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.start(1, "a", "k")
			s.HandleEnded("g", "c", 1, false)
			s.handle(1, "a", "k")
			s.handle(1, "a", "k")
			s.handle(2, "b", "k")
		}},
		{"order around a dead message", Order, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.start(1, "a", "k")
			s.HandleEnded("g", "c", 1, false)
			s.start(2, "b", "k")
			s.end(2)
			s.start(1, "a", "k")
			s.HandleEnded("g", "c", 1, false)
			s.Dead("g", 1)
		}, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.start(1, "a", "k")
			s.HandleEnded("g", "c", 1, false)
			s.start(2, "b", "k")
			s.end(2)
			s.Dead("g", 1)
		}},
		{"concurrency", Concurrency, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.start(1, "a", "k")
			s.HandleStarted("g", "d", 1, "a", "k", 2)
			s.end(1)
			s.HandleEnded("g", "d", 1, true)
		}, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "l")
			s.start(1, "a", "k")
			s.HandleStarted("g", "d", 2, "b", "l", 1)
			s.end(1)
			s.HandleStarted("g", "d", 1, "a", "k", 2)
			s.HandleEnded("g", "d", 1, true)
			s.HandleEnded("g", "d", 2, true)
		}},
		{"concurrency with a held lease", Concurrency, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.Claimed("g", "l1", 0, 1, 1)
			s.start(1, "a", "k")
			s.Claimed("g", "l2", 0, 1, 2)
			s.HandleStarted("g", "d", 1, "a", "k", 2)
			s.end(1)
			s.HandleEnded("g", "d", 1, true)
		}, func(s script) {
			s.produce(1, "a", "k")
			s.Claimed("g", "l1", 0, 1, 1)
			s.start(1, "a", "k")
			s.Claimed("g", "l2", 0, 1, 2)
			s.HandleStarted("g", "d", 1, "a", "k", 2)
			s.end(1)
			s.Acked("g", "l1", false)
			s.LeaseLost("g", "l2")
			s.Claimed("g", "l3", 0, 1, 3)
			s.HandleStarted("g", "e", 1, "a", "k", 3)
			s.HandleEnded("g", "d", 1, true)
			// e crashed.
			s.HandleStarted("g", "f", 1, "a", "k", 4)
			s.HandleEnded("g", "f", 1, true)
		}},
		{"concurrency under leases", Concurrency, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.startUnder("l1", 1, "a", "k")
			s.startUnder("l2", 1, "a", "k")
			s.endUnder("l1", 1)
			s.endUnder("l2", 1)
		}, func(s script) {
			s.produce(1, "a", "k")
			s.startUnder("l1", 1, "a", "k")
			s.LeaseLost("g", "l1")
			s.startUnder("l2", 1, "a", "k")
			s.startUnder("l1", 1, "a", "k")
			s.endUnder("l1", 1)
			s.endUnder("l1", 1)
			s.endUnder("l2", 1)
		}},
		{"concurrency with a crash", Concurrency, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.startUnder("l1", 1, "a", "k")
			s.startUnder("l2", 1, "a", "k")
			s.LeaseLost("g", "l1")
			s.endUnder("l2", 1)
		}, func(s script) {
			s.produce(1, "a", "k")
			s.startUnder("l1", 1, "a", "k")
			s.LeaseLost("g", "l1")
			s.startUnder("l2", 1, "a", "k")
			s.endUnder("l2", 1)
		}},
		{"order after the lease was lost", Order, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.startUnder("l1", 1, "a", "k")
			s.LeaseLost("g", "l1")
			s.endUnder("l1", 1)
			s.handleUnder("l2", 2, "b", "k")
			s.handleUnder("l3", 1, "a", "k")
			s.handleUnder("l3", 2, "b", "k")
		}, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.startUnder("l1", 1, "a", "k")
			s.LeaseLost("g", "l1")
			s.startUnder("l1", 2, "b", "k")
			s.endUnder("l1", 1)
			s.endUnder("l1", 2)
			s.handleUnder("l2", 1, "a", "k")
			s.handleUnder("l2", 2, "b", "k")
		}},
		{"order after going back", Order, ordered, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.handleUnder("l1", 1, "a", "k")
			s.handleUnder("l1", 2, "b", "k")
			s.handleUnder("l2", 1, "a", "k")
		}, func(s script) {
			s.produce(1, "a", "k")
			s.produce(2, "b", "k")
			s.handleUnder("l1", 1, "a", "k")
			s.handleUnder("l1", 2, "b", "k")
			s.handleUnder("l2", 1, "a", "k")
			s.handleUnder("l2", 2, "b", "k")
			s.Acked("g", "l2", true)
			s.Seek("g", 0)
			s.handleUnder("l3", 1, "a", "k")
		}},
		{"lost to a stray", Lost, all, func(s script) {
			s.produce(1, "a", "")
			s.startUnder("l1", 1, "a", "")
			s.LeaseLost("g", "l1")
			s.endUnder("l1", 1)
		}, func(s script) {
			s.produce(1, "a", "")
			s.startUnder("l1", 1, "a", "")
			s.endUnder("l1", 1)
			s.LeaseLost("g", "l1")
		}},
		{"duplicate under one lease", Duplicate, all, func(s script) {
			s.produce(1, "a", "")
			s.handleUnder("l1", 1, "a", "")
			s.handleUnder("l1", 1, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.startUnder("l1", 1, "a", "")
			s.HandleEndedUnder("g", "c", "l1", 1, false)
			s.handleUnder("l1", 1, "a", "")
			s.handleUnder("l2", 1, "a", "")
		}},
		{"duplicate after the lease was acknowledged", Duplicate, all, func(s script) {
			s.produce(1, "a", "")
			s.handleUnder("l1", 1, "a", "")
			s.Acked("g", "l1", true)
			s.handleUnder("l2", 1, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.handleUnder("l1", 1, "a", "")
			s.Acked("g", "l0", true)
			s.handleUnder("l2", 1, "a", "")
			s.Acked("g", "l2", true)
		}},
		{"duplicate after an effect", Duplicate, all, func(s script) {
			s.produce(1, "a", "")
			s.handle(1, "a", "")
			s.Effect("g", 1)
			s.handle(1, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.handle(1, "a", "")
			s.handle(1, "a", "")
			s.Effect("g", 1)
		}},
		{"two values", TwoContents, Options{}, func(s script) {
			s.produce(1, "a", "")
			s.produce(1, "b", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.ProduceStarted("u", "b", "")
			s.Produced("u", 1, "b", "")
		}},
		{"two keys", TwoContents, Options{}, func(s script) {
			s.produce(1, "a", "k")
			s.handle(1, "a", "l")
		}, func(s script) {
			s.ProduceStarted("t", "a", "k")
			s.Resolved("a", true, 1)
			s.handle(1, "a", "k")
		}},
		{"two keys at once", TwoContents, Options{}, func(s script) {
			s.ProduceStarted("t", "a", "k")
			s.Produced("t", 1, "a", "")
		}, func(s script) {
			s.ProduceStarted("t", "a", "k")
			s.Produced("t", 1, "a", "k")
		}},
		{"two places", TwoPlaces, Options{}, func(s script) {
			s.produce(1, "a", "")
			s.handle(2, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.handle(1, "a", "")
		}},
		{"late ack", LateAck, Options{}, func(s script) {
			s.Claimed("g", "l1", 0, 1, 1)
			s.LeaseLost("g", "l1")
			s.Acked("g", "l1", true)
		}, func(s script) {
			s.Claimed("g", "l1", 0, 1, 1)
			s.LeaseLost("g", "l1")
			s.Acked("g", "l1", false)
			s.Claimed("g", "l1", 0, 1, 2)
			s.Acked("g", "l1", true)
			s.LeaseLost("g", "l1")
		}},
		{"late ack of an unknown claim", LateAck, Options{}, func(s script) {
			s.LeaseLost("g", "l1")
			s.Acked("g", "l1", true)
		}, func(s script) {
			s.LeaseLost("g", "l1")
			s.Acked("h", "l1", true)
		}},
		{"no effect", Effects, once, func(s script) {
			s.produce(1, "a", "")
			s.handle(1, "a", "")
		}, func(s script) {
			s.produce(1, "a", "")
			s.Effect("g", 1)
			s.produce(2, "b", "")
			s.Dead("g", 2)
		}},
		{"two effects", Effects, once, func(s script) {
			s.produce(1, "a", "")
			s.Effect("g", 1)
			s.Effect("g", 1)
		}, func(s script) {
			s.produce(1, "a", "")
			s.Effect("g", 1)
			s.Effect("h", 1)
			s.Effect("h", 1)
		}},
		{"effect of nothing", Effects, once, func(s script) {
			s.produce(1, "a", "")
			s.Effect("g", 1)
			s.Effect("g", 2)
		}, func(s script) {
			s.produce(1, "a", "")
			s.Effect("g", 1)
			s.ProduceStarted("t", "b", "")
			s.Effect("g", 2)
		}},
		{"setup", Setup, all, func(s script) {
			s.Settled("t", 1)
			s.Settled("u", 1)
		}, func(s script) {
			s.Settled("t", 1)
		}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			bad := record(test.bad)
			r := Judge(bad, test.o)
			if r.OK() || len(r.Violated) != 1 || r.Violated[test.kind] != 1 {
				t.Errorf("bad history: want one %q, got\n%s", test.kind, r)
			}
			if r := Judge(record(test.good), test.o); !r.OK() {
				t.Errorf("good history:\n%s", r)
			}
			if t.Failed() {
				return
			}
			if v := r.Violations[0]; v.Message == "" || len(v.Events) == 0 && v.Kind != Setup {
				t.Errorf("violation tells nothing: %+v", v)
			}
			shuffled := slices.Clone(bad)
			slices.Reverse(shuffled)
			if s := Judge(shuffled, test.o); !reflect.DeepEqual(r, s) {
				t.Errorf("judged by the order of the slice:\n%s", s)
			}
			if test.kind == Setup {
				return
			}
			small := Simplify(bad, test.o)
			if s := Judge(small, test.o); s.Violated[test.kind] == 0 || len(small) > len(bad) {
				t.Errorf("simplified to\n%s", s)
			}
		})
	}
}

// later returns a time that is truly after all that was recorded.
func later(s script) int64 {
	now := s.Now()
	for s.Now() == now {
	}
	return s.Now()
}

func TestAllowDuplicates(t *testing.T) {
	h := record(func(s script) {
		s.produce(1, "a", "")
		s.run(1, "a", "", "l1")
		s.handle(1, "a", "")
	})
	r := Judge(h, Options{AllowDuplicates: true})
	if g := r.Groups["g"]; !r.OK() || g.Duplicates != 1 || g.Redelivered != 1 || g.Distinct != 1 {
		t.Errorf("got %s", r)
	}
}

func TestSlack(t *testing.T) {
	h := []Event{
		{Kind: KindSettled, Time: 100, Seq: 1, Topic: "t", ID: 5},
		{Kind: KindProduceStarted, Time: 150, Seq: 1, Proc: 1, Topic: "t", Value: "a"},
		{Kind: KindProduced, Time: 160, Seq: 2, Proc: 1, Topic: "t", Value: "a", ID: 5},
	}
	if r := Judge(h, Options{}); r.Violated[Skip] != 1 {
		t.Errorf("without slack: %s", r)
	}
	if r := Judge(h, Options{Slack: 50}); !r.OK() {
		t.Errorf("with slack: %s", r)
	}
}

func TestSeveralTopics(t *testing.T) {
	h := record(func(s script) {
		for _, topic := range []string{"t", "u"} {
			s.ProduceStarted(topic, topic+"1", "k")
			s.Produced(topic, 1, topic+"1", "k")
			s.Claimed(topic+"g", "l", 0, 1, 1)
			s.HandleStarted(topic+"g", "c", 1, topic+"1", "k", 1)
			s.HandleEnded(topic+"g", "c", 1, true)
		}
	})
	o := Options{Groups: []string{"tg", "ug"}, OrderedGroups: []string{"tg"}}
	r := Judge(h, o)
	if !r.OK() || r.Groups["ug"].Topic != "u" || r.Groups["ug"].Distinct != 1 {
		t.Errorf("got %s", r)
	}
	o.Groups = append(o.Groups, "x")
	o.Topics = map[string]string{"x": "u"}
	if r := Judge(h, o); len(r.Violated) != 1 || r.Violated[Lost] != 1 {
		t.Errorf("got %s", r)
	}
}

func TestReport(t *testing.T) {
	h := record(func(s script) {
		for i := range int64(200) {
			s.produce(i+1, fmt.Sprint("v", i), "")
		}
		s.run(1, "v0", "", "l")
		s.Fault("kill")
	})
	r := Judge(h, Options{Groups: []string{"g"}, Keep: 7})
	if r.Lost != 199 || r.Groups["g"].Lost != 199 || r.Violated[Lost] != 199 || len(r.Violations) != 7 ||
		r.Produced != 200 || r.Faults["kill"] != 1 {
		t.Errorf("got %s", r)
	}
	text := r.String()
	for _, want := range []string{"200 produced", "lost 199", "fault kill: 1", "v1"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if len(text) > 2000 {
		t.Errorf("summary has %d characters", len(text))
	}
	data, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	if back.OK() || back.String() != text {
		t.Errorf("read back as\n%s", back)
	}
}

func TestRecorderConcurrently(t *testing.T) {
	const writers, each = 8, 3 * chunk / 8
	r := New()
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				value := fmt.Sprint(w, "-", i)
				r.ProduceStarted("t", value, "")
				r.Produced("t", int64(w*each+i+1), value, "")
				if i%1000 == 0 {
					r.Events()
				}
			}
		})
	}
	wg.Wait()
	events := r.Events()
	if len(events) != 2*writers*each || r.Len() != len(events) {
		t.Fatalf("%d events, Len %d", len(events), r.Len())
	}
	for i, e := range events {
		if e.Seq != int64(i+1) || i > 0 && e.Time < events[i-1].Time {
			t.Fatalf("event %d out of order: %v", i, e)
		}
	}
	if rep := Judge(events, Options{}); !rep.OK() || rep.Produced != writers*each {
		t.Errorf("got %s", rep)
	}
}

func TestProcesses(t *testing.T) {
	parent := New()
	parent.ProduceStarted("t", "a<b", "k")
	parent.Produced("t", 1, "a<b", "k")
	time.Sleep(time.Millisecond)
	child := Join(parent.Base(), 1)
	var stream, file bytes.Buffer
	child.Stream(&stream)
	child.Claimed("g", "l", 0, 1, 1)
	child.HandleStarted("g", "c", 1, "a<b", "k", 1)
	child.HandleEnded("g", "c", 1, true)
	child.Acked("g", "l", true)
	time.Sleep(time.Millisecond)
	parent.SettledSince(parent.Now(), "t", 1)
	if err := child.Err(); err != nil {
		t.Fatal(err)
	}
	if err := child.Write(&file); err != nil {
		t.Fatal(err)
	}
	// What a killed process leaves may end in the middle of a line.
	stream.WriteString(`{"kind":"Acked","gr`)
	for _, f := range []*bytes.Buffer{&stream, &file} {
		part, err := Read(f)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(part, child.Events()) {
			t.Errorf("read back as %v", part)
		}
		all := Merge(part, parent.Events())
		if len(all) != 7 || all[0].Kind != KindProduceStarted || all[6].Kind != KindSettled {
			t.Errorf("merged to %v", all)
		}
		if r := Judge(all, Options{Groups: []string{"g"}}); !r.OK() {
			t.Errorf("got %s", r)
		}
	}
}

func TestRoundTripOfEveryKind(t *testing.T) {
	var events []Event
	for k := KindProduceStarted; k <= KindFault; k++ {
		events = append(events, Event{
			Kind: k, OK: true, Proc: 2, Attempt: 3, Time: 4, Seq: int64(k), Began: 5, ID: 6, Low: -7, High: 8,
			Topic: "t", Group: "g", By: "b", Lease: "l", Value: strings.Repeat("v", 1<<17), Key: "k\n\"",
		})
		if s := events[len(events)-1].String(); !strings.Contains(s, k.String()) {
			t.Errorf("kind %d reads %.80s", k, s)
		}
	}
	var b bytes.Buffer
	if err := Write(&b, events); err != nil {
		t.Fatal(err)
	}
	back, err := Read(&b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(events, back) {
		t.Error("not the same events")
	}
	for _, bad := range []string{"{}x\n", `{"kind":"Nonsense"}` + "\n"} {
		if _, err := Read(strings.NewReader(bad)); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
	if err := Write(&b, []Event{{}}); err == nil {
		t.Error("an event of no kind was written")
	}
}

// large makes a correct history of n messages handled by the groups in
// batches, some of them twice because the lease was lost.
func large(n int, groups ...string) []Event {
	const batch = 50
	values := make([]string, n+1)
	keys := make([]string, n+1)
	r := New()
	for i := 1; i <= n; i++ {
		values[i], keys[i] = fmt.Sprint("value-", i), fmt.Sprint("key-", i%1000)
		r.ProduceStarted("t", values[i], keys[i])
		r.Committing(values[i])
		r.Produced("t", int64(i), values[i], keys[i])
		if i%batch != 0 {
			continue
		}
		r.Settled("t", int64(i))
		for _, g := range groups {
			for attempt := 1; attempt < 3; attempt++ {
				lease := fmt.Sprint("lease-", i, "-", attempt)
				r.Claimed(g, lease, int64(i-batch), int64(i), attempt)
				for k := i - batch + 1; k <= i; k++ {
					r.HandleStarted(g, lease, int64(k), values[k], keys[k], attempt)
					r.HandleEnded(g, lease, int64(k), true)
				}
				if i%(20*batch) == 0 && attempt == 1 {
					r.LeaseLost(g, lease)
					r.Acked(g, lease, false)
					continue
				}
				r.Acked(g, lease, true)
				break
			}
			r.CursorAt(g, int64(i))
		}
	}
	return r.Events()
}

func TestLarge(t *testing.T) {
	const n = 300_000
	groups := []string{"g1", "g2", "g3"}
	h := large(n, groups...)
	o := Options{Groups: groups, OrderedGroups: groups[:1]}
	start := time.Now()
	r := Judge(h, o)
	took := time.Since(start)
	t.Logf("%d events judged in %v", len(h), took)
	if !r.OK() || r.Produced != n || r.Groups["g2"].Distinct != n {
		t.Errorf("got %s", r)
	}
	// Far more than it needs, even with the race detector on a busy machine;
	// something quadratic would take hours.
	if took > 2*time.Minute {
		t.Errorf("took %v", took)
	}
}

func TestSimplify(t *testing.T) {
	h := large(5000, "g")
	o := Options{Groups: []string{"g"}, OrderedGroups: []string{"g"}}
	if s := Simplify(h, o); s != nil {
		t.Errorf("nothing is wrong, yet there are %d events", len(s))
	}
	// A message is handled again after it was acknowledged.
	at := func(kind Kind, value string) int {
		return slices.IndexFunc(h, func(e Event) bool { return e.Kind == kind && e.Value == value })
	}
	started := h[at(KindHandleStarted, "value-1234")]
	last := h[len(h)-1]
	for i, e := range []Event{started, {Kind: KindHandleEnded, Group: "g", By: started.By, ID: 1234, OK: true}} {
		e.Time, e.Seq = last.Time+int64(i)+1, last.Seq+int64(i)+1
		h = append(h, e)
	}
	r := Judge(h, o)
	if r.Violated[Duplicate] != 1 || len(r.Violated) != 1 {
		t.Fatalf("got %s", r)
	}
	small := Simplify(h, o)
	s := Judge(small, o)
	if s.Violated[Duplicate] != 1 || len(small) > 6 {
		t.Errorf("simplified to %d events:\n%s", len(small), s)
	}
	around := Around(h, o, r.Violations[0])
	if len(around) != 9 {
		t.Errorf("%d events around:\n%v", len(around), around)
	}
}

// A violation that depends on more than its own messages is found by trial.
func TestReduce(t *testing.T) {
	var units [][]int32
	for i := range int32(1000) {
		units = append(units, []int32{2 * i, 2*i + 1})
	}
	trials := 0
	got := reduce(units, func(keep []int32) bool {
		trials++
		return slices.IsSorted(keep) && slices.Contains(keep, 10) && slices.Contains(keep, 777) && slices.Contains(keep, 1998)
	})
	if want := []int32{10, 11, 776, 777, 1998, 1999}; !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
	if trials > 500 {
		t.Errorf("%d trials", trials)
	}
}

func BenchmarkRecorder(b *testing.B) {
	r := New()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			r.HandleStarted("g", "c", 1, "value", "key", 1)
		}
	})
}

func BenchmarkJudge(b *testing.B) {
	groups := []string{"g1", "g2", "g3"}
	h := large(1_000_000, groups...)
	for b.Loop() {
		if r := Judge(h, Options{Groups: groups, OrderedGroups: groups}); !r.OK() {
			b.Fatal(r)
		}
	}
}

// What a crash took back is no fall, and an id that is given out again after it no skip.
func TestRestarted(t *testing.T) {
	for _, crash := range []bool{false, true} {
		r := New()
		r.Settled("t", 10)
		r.CursorAt("g", 10)
		if crash {
			r.Restarted()
		}
		r.Settled("t", 8)
		r.CursorAt("g", 8)
		r.Settled("t", 12)
		r.ProduceStarted("t", "a", "")
		r.Committing("a")
		if crash {
			r.Restarted()
		}
		r.Produced("t", 11, "a", "")
		rep := Judge(r.Events(), Options{Topics: map[string]string{"g": "t"}})
		if crash && !rep.OK() {
			t.Errorf("with a crash: %s", rep)
		}
		if !crash && (rep.Violated[Fall] != 2 || rep.Violated[Skip] != 1) {
			t.Errorf("without a crash: %s", rep)
		}
	}
}
