package main

import (
	"context"
	"fmt"
	"time"
)

func init() {
	register(Workload{
		Name:  "drain",
		Short: "four producers of 250-message batches at full speed while one group drains: nothing may be skipped",
		Run:   drain,
	})
}

// drain counts what was never delivered. The producers' transactions overlap all the time, so that ids commit out of order: a group
// that trusts the highest visible id skips some.
func drain(ctx context.Context, e *Env) error {
	batches := e.Runs(100, 20) // of each producer
	e.Parameter("producers", producers)
	e.Parameter("messages a batch", batchSize)
	e.Parameter("batches a producer", batches)

	lost, twice := 0, 0
	for i := range e.Runs(5, 1) {
		r, err := spread(ctx, e, 1, 1, batches)
		if err != nil {
			return fmt.Errorf("run %d: %w", i+1, err)
		}
		lost += r.lost
		twice += r.twice
		if lost > 0 {
			break
		}
		e.Logf("drain: run %d: %d messages in %v", i+1, r.messages, r.took.Round(time.Millisecond))
		e.Record("produced", "messages/s", r.produced)
		e.Record("drained", "messages/s", r.delivered)
	}
	e.Parameter("delivered twice", twice)
	account{"weir": lost}.close(e)
	return nil
}
