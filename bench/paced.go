package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/weirhq/weir"
)

// delays gathers how long messages took from their commit, as the producer saw it, to the handler.
type delays struct {
	mu      sync.Mutex
	sent    map[int64]time.Time
	handled map[int64]time.Time
	twice   int
	longest time.Duration // of the producers' transactions, where they are timed
}

func newDelays() *delays {
	return &delays{sent: map[int64]time.Time{}, handled: map[int64]time.Time{}}
}

type numbered struct {
	N int64 `json:"n"`
}

func (d *delays) produced(n int64, at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sent[n] = at
}

func (d *delays) handle(_ context.Context, m *weir.Received[numbered]) error {
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, again := d.handled[m.Value.N]; again {
		d.twice++
		return nil
	}
	d.handled[m.Value.N] = now
	return nil
}

// left is how many messages were committed and not handled yet.
func (d *delays) left() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for k := range d.sent {
		if _, ok := d.handled[k]; !ok {
			n++
		}
	}
	return n
}

// sorted are the delays, in rising order, of what was committed and handled. One that was handled before its producer heard
// of its commit counts as 0.
func (d *delays) sorted() []time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []time.Duration
	for n, sent := range d.sent {
		if handled, ok := d.handled[n]; ok {
			all = append(all, max(0, handled.Sub(sent)))
		}
	}
	slices.Sort(all)
	return all
}

// outliers says when delays above a limit happened: a handful at one moment is the machine's, those all along are the fence's.
func (d *delays) outliers(limit time.Duration) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var began time.Time
	for _, sent := range d.sent {
		if began.IsZero() || sent.Before(began) {
			began = sent
		}
	}
	n, at := 0, map[time.Duration]bool{}
	for k, sent := range d.sent {
		if handled, ok := d.handled[k]; ok && handled.Sub(sent) > limit {
			n++
			at[sent.Sub(began).Round(time.Second)] = true
		}
	}
	return fmt.Sprintf("%d of %d, at %v", n, len(d.sent), slices.Sorted(maps.Keys(at)))
}

// record puts the delays of one case into the result, with those above limit, and returns the longest.
func (d *delays) record(e *Env, workload, name string, limit time.Duration) time.Duration {
	all := d.sorted()
	p50, p99, longest := quantile(all, 0.5), quantile(all, 0.99), quantile(all, 1)
	e.Logf("%s: %s: %d messages, p50 %v, p99 %v, max %v", workload, name, len(all), p50, p99, longest)
	e.Parameter("delays above "+limit.String()+", "+name, d.outliers(limit))
	e.Record("p50, "+name, "ms", milliseconds(p50))
	e.Record("p99, "+name, "ms", milliseconds(p99))
	e.Record("max, "+name, "ms", milliseconds(longest))
	return longest
}

func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// payloadOf is a message of about 200 bytes with a number in it.
func payloadOf(n int64) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"n":%d,"pad":%q}`, n, padding))
}

const padding = "................................................................................................................................................................"

// waitFor polls a condition until it holds.
func waitFor(ctx context.Context, limit time.Duration, holds func() bool) bool {
	deadline := time.Now().Add(limit)
	for !holds() {
		if ctx.Err() != nil || time.Now().After(deadline) {
			return false
		}
		time.Sleep(10 * time.Millisecond)
	}
	return true
}
