package main

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"
)

func init() {
	register(Workload{
		Name:     "single",
		Short:    "16 callers that produce one message each and wait for it, while one group drains",
		Settings: compared,
		Peers:    []string{"floor", "pgq", "watermill", "river", "nats", "nats-always"},
		Run:      single,
		Plots:    []Plot{{Title: "One message a call", Figures: []string{"produced"}}},
	})
}

const singleCallers = 16

// single has callers that do not batch. What they share, such as a flush of the log, is the system's merit.
func single(ctx context.Context, e *Env) error {
	all, err := e.peers(ctx)
	if err != nil {
		return err
	}
	length := e.For(8*time.Second, 500*time.Millisecond)
	e.Parameter("callers", singleCallers)
	e.Parameter("callers stop after", length.String())
	lost := account{}
	figures := []measured{{"produced", "messages/s", true}, {"call p50", "ms", false}, {"call p99", "ms", false}}
	err = e.rounds(e.Runs(5, 1), all, figures, func(p Peer) (map[string]float64, error) {
		var (
			t     *tally
			took  time.Duration
			calls = make([][]time.Duration, singleCallers)
		)
		err := e.turn(ctx, p, Shape{Callers: singleCallers}, func(s System) error {
			t = newTally(int(length.Seconds() * 200_000))
			return consuming(ctx, s, t, func() error {
				var group errgroup.Group
				for i := range calls {
					group.Go(func() error {
						for time.Since(t.began) < length {
							began := time.Now()
							if err := s.Produce(ctx, t.orders(1)); err != nil {
								return err
							}
							t.produced.Add(1)
							calls[i] = append(calls[i], time.Since(began))
						}
						return nil
					})
				}
				if err := group.Wait(); err != nil {
					return err
				}
				took = time.Since(t.began)
				t.drained(ctx, p.patience())
				return ctx.Err()
			})
		})
		if err != nil || !lost.sound(e, p, t) {
			return nil, err
		}
		sorted := sortedTogether(calls)
		return map[string]float64{
			"produced": float64(t.produced.Load()) / took.Seconds(),
			"call p50": milliseconds(quantile(sorted, 0.5)),
			"call p99": milliseconds(quantile(sorted, 0.99)),
		}, nil
	})
	if err != nil {
		return err
	}
	lost.close(e)
	e.AtLeast("produced against floor", 3)
	e.AtLeast("produced against nats", 1)
	return nil
}
