package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:     "fanout",
		Short:    "4 producers at full speed into one topic while 1, 2, 8 or 50 groups drain it",
		Settings: compared,
		Run:      fanout,
		Plots:    []Plot{{Title: "Deliveries to all groups together", Figures: []string{"delivered"}}},
	})
	register(Workload{
		Name:     "topics",
		Short:    "4 producers at full speed into 1, 4 or 16 topics, each with a group that drains it",
		Settings: compared,
		Run:      topics,
		Plots:    []Plot{{Title: "Throughput by number of topics", Figures: []string{"delivered", "produced"}}},
	})
}

// fanout has each group get each message: all that groups share is the log and its fence.
func fanout(ctx context.Context, e *Env) error {
	batches := e.Runs(100, 5)
	e.Parameter("messages", producers*batches*batchSize)
	e.Parameter("messages, 50 groups", producers*max(batches/5, 1)*batchSize)
	lost := 0
	for range e.Runs(5, 1) {
		rate := map[int]float64{}
		for _, groups := range []int{1, 2, 8, 50} {
			n := batches
			if groups == 50 {
				n = max(batches/5, 1)
			}
			r, err := spread(ctx, e, 1, groups, n)
			if err != nil {
				return fmt.Errorf("%d groups: %w", groups, err)
			}
			e.Logf("fanout: %d groups: %.0f deliveries/s, produced %.0f/s", groups, r.delivered, r.produced)
			lost += r.lost
			rate[groups] = r.delivered
			e.Record(fmt.Sprintf("delivered, %d groups", groups), "messages/s", r.delivered)
			e.Record(fmt.Sprintf("produced, %d groups", groups), "messages/s", r.produced)
		}
		e.Record("deliveries to 8 groups against 1", "x", rate[8]/rate[1])
	}
	account{"weir": lost}.close(e)
	e.AtLeast("deliveries to 8 groups against 1", 4)
	return nil
}

func topics(ctx context.Context, e *Env) error {
	batches := e.Runs(100, 8)
	e.Parameter("messages", producers*batches*batchSize)
	lost := 0
	for range e.Runs(5, 1) {
		for _, n := range []int{1, 4, 16} {
			r, err := spread(ctx, e, n, 1, batches)
			if err != nil {
				return fmt.Errorf("%d topics: %w", n, err)
			}
			e.Logf("topics: %d topics: delivered %.0f/s, produced %.0f/s", n, r.delivered, r.produced)
			lost += r.lost
			e.Record(fmt.Sprintf("delivered, %d topics", n), "messages/s", r.delivered)
			e.Record(fmt.Sprintf("produced, %d topics", n), "messages/s", r.produced)
		}
	}
	account{"weir": lost}.close(e)
	return nil
}

type spreadOut struct {
	delivered, produced float64 // messages/s; delivered to all groups together
	lost, twice         int
	messages            int
	took                time.Duration
}

// spread has four producers store batches, each batch into the next of several topics, while several groups of each topic drain it.
// Payloads are taken as they are, without a look at more than their beginning: to decode them costs each group the same, and more
// than to deliver them, so that nothing else would show.
func spread(ctx context.Context, e *Env, topics, groups, batches int) (spreadOut, error) {
	if err := e.Server.Exec(ctx, "postgres", "checkpoint"); err != nil {
		return spreadOut{}, err
	}
	defer e.dropDatabases(ctx)
	dsn, err := e.Database(ctx)
	if err != nil {
		return spreadOut{}, err
	}
	var clients []*weir.Client
	for _, conns := range []int{producers, 2 * consumerConns} {
		p, err := pool(ctx, dsn, conns)
		if err != nil {
			return spreadOut{}, err
		}
		defer p.Close()
		c, err := weir.New(p, &weir.Options{Logger: quiet()})
		if err != nil {
			return spreadOut{}, err
		}
		defer c.Close()
		clients = append(clients, c)
	}
	producer, consumer := clients[0], clients[1]
	if err := consumer.Migrate(ctx); err != nil {
		return spreadOut{}, err
	}

	// A topic's numbers come from the first of its tallies; each group of it has one.
	var (
		tallies   = make([][]*tally, topics)
		consuming errgroup.Group
	)
	running, stop := context.WithCancel(ctx)
	defer stop()
	for i := range tallies {
		topic := fmt.Sprintf("orders-%d", i)
		if err := consumer.CreateTopic(ctx, topic, nil); err != nil {
			return spreadOut{}, err
		}
		for g := range groups {
			t := newTally(producers * batchSize * (batches/topics + 1))
			tallies[i] = append(tallies[i], t)
			group := fmt.Sprintf("group-%d", g)
			if err := consumer.CreateGroup(ctx, topic, group, nil); err != nil {
				return spreadOut{}, err
			}
			k, err := consumer.NewConsumer(topic, group, weir.HandleBatch(func(_ context.Context, messages []*weir.Received[[]byte]) error {
				var o Order
				for _, m := range messages {
					if err := o.head(m.Raw); err != nil {
						return err
					}
					t.handled(&o)
				}
				return nil
			}), &weir.ConsumerOptions{BatchSize: 500, Prefetch: 1000})
			if err != nil {
				return spreadOut{}, err
			}
			consuming.Go(func() error { return k.Run(running) })
		}
	}
	began := time.Now()
	for _, of := range tallies {
		for _, t := range of {
			t.began = began
		}
	}
	var producing errgroup.Group
	for p := range producers {
		producing.Go(func() error {
			for b := range batches {
				i := (p + b) % topics
				orders := tallies[i][0].orders(batchSize)
				messages := make([]weir.Message, len(orders))
				for k := range orders {
					messages[k].Payload = &orders[k]
				}
				if _, err := producer.Produce(ctx, fmt.Sprintf("orders-%d", i), messages...); err != nil {
					return err
				}
				for _, t := range tallies[i] {
					t.produced.Add(int64(len(orders)))
				}
			}
			return nil
		})
	}
	err = producing.Wait()
	r := spreadOut{}
	stored := time.Since(began)
	if err == nil {
		var last time.Duration
		for _, of := range tallies {
			r.messages += int(of[0].produced.Load())
			for _, t := range of {
				t.drained(ctx, 15*time.Second)
				r.lost += t.lost()
				r.twice += int(t.twice.Load())
				last = max(last, time.Duration(t.last.Load()))
			}
		}
		r.took = last
		r.produced = float64(r.messages) / stored.Seconds()
		r.delivered = float64(r.messages*groups-r.lost) / last.Seconds()
	}
	stop()
	if e := consuming.Wait(); err == nil {
		err = e
	}
	return r, err
}
