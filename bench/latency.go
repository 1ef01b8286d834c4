package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

func init() {
	register(Workload{
		Name:     "latency",
		Short:    "single messages at 500/s and 50/s, default settings: from the produce call to the handler",
		Settings: compared,
		Peers:    []string{"floor", "nats-always", "nats", "pgq", "watermill", "river"},
		Run:      latency,
		Plots: []Plot{
			{Title: "From the produce call to the handler, 500/s", Figures: []string{"p50 at 500/s", "p99 at 500/s"}, Log: true},
			{Title: "From the produce call to the handler, 50/s", Figures: []string{"p50 at 50/s", "p99 at 50/s"}, Log: true},
		},
	})
}

const latencyCallers = 16

var latencyRates = []int{500, 50}

// latency sends messages when they are due, however long those before them take, so that no delay hides the next one.
func latency(ctx context.Context, e *Env) error {
	all, err := e.peers(ctx)
	if err != nil {
		return err
	}
	length := e.For(10*time.Second, 600*time.Millisecond)
	e.Parameter("length at each rate", length.String())
	e.Parameter("connections of the producer", latencyCallers)
	e.Parameter("the produce call of floor", "one INSERT and its commit, without a delivery")
	lost := account{}
	var figures []measured
	for _, rate := range latencyRates {
		for _, f := range []string{"p50", "p99", "call p50"} {
			figures = append(figures, measured{fmt.Sprintf("%s at %d/s", f, rate), "ms", rate == latencyRates[0] && f != "call p50"})
		}
	}
	err = e.rounds(e.Runs(3, 1), all, figures, func(p Peer) (map[string]float64, error) {
		of := map[string]float64{}
		sound := true
		err := e.turn(ctx, p, Shape{Callers: latencyCallers, Defaults: true}, func(s System) error {
			t := newTally(int(time.Duration(latencyRates[0]+latencyRates[1]+200) * (length + time.Second) / time.Second))
			err := consuming(ctx, s, t, func() error {
				// Connections, plans and caches.
				if _, err := paced(ctx, s, t, 100, min(length, time.Second)); err != nil {
					return err
				}
				for _, rate := range latencyRates {
					first := t.numbers.Load()
					calls, err := paced(ctx, s, t, rate, length)
					if err != nil {
						return err
					}
					t.drained(ctx, p.patience())
					delays := t.delays(first)
					if p.Name == "floor" {
						delays = calls // the least that a commit takes, without any reader
					}
					of[fmt.Sprintf("p50 at %d/s", rate)] = milliseconds(quantile(delays, 0.5))
					of[fmt.Sprintf("p99 at %d/s", rate)] = milliseconds(quantile(delays, 0.99))
					of[fmt.Sprintf("call p50 at %d/s", rate)] = milliseconds(quantile(calls, 0.5))
				}
				return ctx.Err()
			})
			sound = lost.sound(e, p, t)
			return err
		})
		if err != nil || !sound {
			return nil, err
		}
		return of, nil
	})
	if err != nil {
		return err
	}
	lost.close(e)
	e.AtMost("p50 at 500/s against nats-always", 1)
	e.AtMost("p99 at 500/s against nats-always", 1)
	e.AtMost("p50 at 500/s against floor", 1.5)
	return nil
}

// paced produces single messages at a rate, and returns how long the calls took, in rising order.
func paced(ctx context.Context, s System, t *tally, rate int, length time.Duration) ([]time.Duration, error) {
	var (
		mu    sync.Mutex
		calls []time.Duration
		group errgroup.Group
	)
	err := pace(ctx, rate, length, func(int64) error {
		group.Go(func() error {
			began := time.Now()
			if err := s.Produce(ctx, t.orders(1)); err != nil {
				return err
			}
			t.produced.Add(1)
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, time.Since(began))
			return nil
		})
		return nil
	})
	if e := group.Wait(); err == nil {
		err = e
	}
	slices.Sort(calls)
	return calls, err
}

// sortedTogether puts the durations of several goroutines into one rising order.
func sortedTogether(of [][]time.Duration) []time.Duration {
	all := slices.Concat(of...)
	slices.Sort(all)
	return all
}
