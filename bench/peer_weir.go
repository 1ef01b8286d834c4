package main

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
)

func init() {
	registerPeer(Peer{Name: "weir", Short: "Weir: Produce, and a consumer with HandleBatch (with Handle where defaults are measured)", Open: openWeir})
}

type weirSystem struct {
	producer, consumer *weir.Client
	pools              []*pgxpool.Pool
	shape              Shape
}

// batchOptions are those with which a consumer of batches is the quickest.
func batchOptions() *weir.ConsumerOptions {
	return &weir.ConsumerOptions{BatchSize: 500, Prefetch: 4000}
}

func openWeir(ctx context.Context, e *Env, shape Shape) (System, error) {
	dsn, err := e.Database(ctx)
	if err != nil {
		return nil, err
	}
	s := &weirSystem{shape: shape}
	for client, conns := range map[**weir.Client]int{&s.producer: shape.Callers, &s.consumer: consumerConns} {
		p, err := pool(ctx, dsn, conns)
		if err != nil {
			return nil, err
		}
		s.pools = append(s.pools, p)
		if *client, err = weir.New(p, &weir.Options{Logger: quiet()}); err != nil {
			return nil, err
		}
	}
	if err := s.consumer.Migrate(ctx); err != nil {
		return nil, err
	}
	if err := s.consumer.CreateTopic(ctx, "orders", nil); err != nil {
		return nil, err
	}
	return s, s.consumer.CreateGroup(ctx, "orders", "billing", nil)
}

func (s *weirSystem) Produce(ctx context.Context, orders []Order) error {
	messages := make([]weir.Message, len(orders))
	for i := range orders {
		messages[i].Payload = &orders[i]
	}
	_, err := s.producer.Produce(ctx, "orders", messages...)
	return err
}

func (s *weirSystem) Consume(ctx context.Context, handle func(*Order)) error {
	handler := weir.HandleBatch(func(_ context.Context, messages []*weir.Received[Order]) error {
		for _, m := range messages {
			handle(&m.Value)
		}
		return nil
	})
	options := batchOptions()
	if s.shape.Defaults {
		options = nil
		handler = weir.Handle(func(_ context.Context, m *weir.Received[Order]) error {
			handle(&m.Value)
			return nil
		})
	}
	consumer, err := s.consumer.NewConsumer("orders", "billing", handler, options)
	if err != nil {
		return err
	}
	return consumer.Run(ctx)
}

func (s *weirSystem) Close() {
	for _, c := range []*weir.Client{s.producer, s.consumer} {
		c.Close()
	}
	for _, p := range s.pools {
		p.Close()
	}
}
