package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
)

// cycled is what cycles found.
type cycled struct {
	took  []time.Duration // of each cycle, in rising order
	trips float64         // round trips a cycle
	// missed messages were never handled
	missed int
}

// cycles runs a consumer until it has handled n messages. It may hold no more than one, so that it claims, fetches, handles in no
// time, acknowledges and claims again, one after the other: with more, part of the next claim is made while the last messages of
// this one are being settled. A cycle is the time from one call of the handler to the next. The messages are there already.
func cycles(ctx context.Context, client *weir.Client, w *wire, topic, group string, n int) (cycled, error) {
	type beat struct {
		at    time.Time
		trips int64
	}
	var (
		mu    sync.Mutex
		beats []beat
		done  = make(chan struct{})
	)
	k, err := client.NewConsumer(topic, group, weir.Handle(func(context.Context, *weir.Received[[]byte]) error {
		mu.Lock()
		defer mu.Unlock()
		beats = append(beats, beat{time.Now(), w.trips.Load()})
		if len(beats) == n {
			close(done)
		}
		return nil
	}), &weir.ConsumerOptions{Prefetch: 1})
	if err != nil {
		return cycled{}, err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	consumed := make(chan error, 1)
	go func() { consumed <- k.Run(running) }()
	limit := time.NewTimer(30*time.Second + time.Duration(n)*50*time.Millisecond)
	defer limit.Stop()
	select {
	case <-done:
	case <-limit.C:
	case <-ctx.Done():
	}
	stop()
	if err := <-consumed; err != nil {
		return cycled{}, err
	}
	mu.Lock()
	defer mu.Unlock()
	// The first cycles meet connections that are made and plans that are not.
	const warm = 5
	if len(beats) < 2*warm {
		return cycled{}, fmt.Errorf("the consumer handled %d messages of %d", len(beats), n)
	}
	beats = beats[warm:]
	r := cycled{missed: max(0, n-warm-len(beats))}
	for i := range beats[1:] {
		r.took = append(r.took, beats[i+1].at.Sub(beats[i].at))
	}
	slices.Sort(r.took)
	r.trips = float64(beats[len(beats)-1].trips-beats[0].trips) / float64(len(r.took))
	return r, nil
}

// selectOne times "select 1" n times, in rising order.
func selectOne(ctx context.Context, p *pgxpool.Pool, n int) ([]time.Duration, error) {
	conn, err := p.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Release()
	var took []time.Duration
	for range n {
		var one int
		began := time.Now()
		if err := conn.QueryRow(ctx, "select 1").Scan(&one); err != nil {
			return nil, err
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took, nil
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
