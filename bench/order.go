package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Order is the message of the workloads that compare: about 950 bytes as JSON. Whoever produces it marshals it, and whoever
// consumes it unmarshals it, each by itself.
type Order struct {
	// Number counts a run's messages from 0: it tells which were delivered. Sent is when the producer began with it, in
	// nanoseconds of the run.
	Number   int64   `json:"number"`
	Sent     int64   `json:"sent"`
	Customer string  `json:"customer"`
	Currency string  `json:"currency"`
	Total    float64 `json:"total"`
	Lines    []Line  `json:"lines"`
	Note     string  `json:"note"`
}

// Line is a line of an Order.
type Line struct {
	Article  string  `json:"article"`
	Quantity int     `json:"quantity"`
	Price    float64 `json:"price"`
}

// head reads the first two fields alone.
func (o *Order) head(text []byte) (err error) {
	rest, _ := bytes.CutPrefix(text, []byte(`{"number":`))
	number, rest, _ := bytes.Cut(rest, []byte(`,"sent":`))
	sent, _, _ := bytes.Cut(rest, []byte(`,`))
	if o.Number, err = strconv.ParseInt(string(number), 10, 64); err != nil {
		return fmt.Errorf("payload %.40q: %w", text, err)
	}
	o.Sent, err = strconv.ParseInt(string(sent), 10, 64)
	return err
}

var (
	orderLines = func() (lines []Line) {
		for i := range 8 {
			lines = append(lines, Line{Article: fmt.Sprintf("a-%06d", 4711*i), Quantity: i + 1, Price: 12.5 + float64(i)})
		}
		return lines
	}()
	orderNote = strings.Repeat("deliver in the morning ", 20)
)

// orderBytes is about how long an Order is as JSON.
func orderBytes() int {
	text, err := json.Marshal(newTally(1).orders(1)[0])
	if err != nil {
		panic(err) // it has nothing that could not be marshalled
	}
	return len(text)
}

// tally is the account of one run: which messages were produced, and which of them a group was given, and when.
type tally struct {
	began time.Time
	// numbers given out, and how many of them a produce has returned for
	numbers, produced atomic.Int64
	// seen has for each number its delay and 1 ns, once it was delivered
	seen             []atomic.Int64
	delivered, twice atomic.Int64
	last             atomic.Int64 // when the latest of them was delivered for the first time, in ns of the run
}

// newTally makes room for a number of messages.
func newTally(capacity int) *tally {
	return &tally{began: time.Now(), seen: make([]atomic.Int64, capacity)}
}

// orders are the next messages; fewer, or none, where there is no room left.
func (t *tally) orders(n int) []Order {
	first := t.numbers.Add(int64(n)) - int64(n)
	n = int(max(0, min(int64(n), int64(len(t.seen))-first)))
	orders := make([]Order, n)
	sent := int64(time.Since(t.began))
	for i := range orders {
		number := first + int64(i)
		orders[i] = Order{
			Number: number, Sent: sent, Customer: fmt.Sprintf("c-%06d", number%1000), Currency: "EUR", Total: 128.25,
			Lines: orderLines, Note: orderNote,
		}
	}
	return orders
}

// handled notes a delivery. It may be called from any goroutine.
func (t *tally) handled(o *Order) {
	now := int64(time.Since(t.began))
	if !t.seen[o.Number].CompareAndSwap(0, max(1, now-o.Sent+1)) {
		t.twice.Add(1)
		return
	}
	t.delivered.Add(1)
	for last := t.last.Load(); now > last && !t.last.CompareAndSwap(last, now); last = t.last.Load() {
	}
}

// drained waits until all that was produced is delivered. It gives up when nothing was for a while: what is missing then was
// never delivered.
func (t *tally) drained(ctx context.Context, patience time.Duration) {
	before, since := t.delivered.Load(), time.Now()
	for t.delivered.Load() < t.produced.Load() && time.Since(since) < patience && ctx.Err() == nil {
		time.Sleep(2 * time.Millisecond)
		if now := t.delivered.Load(); now != before {
			before, since = now, time.Now()
		}
	}
}

// lost is how many messages were produced and never delivered.
func (t *tally) lost() int { return int(t.produced.Load() - t.delivered.Load()) }

// delays are how long the messages from a number on took from the produce call to the handler, in rising order.
func (t *tally) delays(from int64) []time.Duration {
	var all []time.Duration
	for n := from; n < min(t.numbers.Load(), int64(len(t.seen))); n++ {
		if d := t.seen[n].Load(); d > 0 {
			all = append(all, time.Duration(d-1))
		}
	}
	slices.Sort(all)
	return all
}
