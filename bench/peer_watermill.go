package main

import (
	"context"
	"encoding/json"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
)

func init() {
	registerPeer(Peer{
		Name:    "watermill",
		Short:   "watermill-sql: its default schema, a subscriber that reads 1,000 at a time and looks every millisecond (with defaults: 100, each second)",
		Version: moduleVersion("github.com/ThreeDotsLabs/watermill-sql/v4"),
		Open:    openWatermill,
	})
}

type watermillSystem struct {
	producers, consumers *pgxpool.Pool
	publisher            *wsql.Publisher
	subscriber           *wsql.Subscriber
}

func openWatermill(ctx context.Context, e *Env, shape Shape) (System, error) {
	dsn, err := e.Database(ctx)
	if err != nil {
		return nil, err
	}
	s := &watermillSystem{}
	if s.producers, err = pool(ctx, dsn, shape.Callers); err != nil {
		return nil, err
	}
	if s.consumers, err = pool(ctx, dsn, consumerConns); err != nil {
		return nil, err
	}
	schema := wsql.DefaultPostgreSQLSchema{}
	config := wsql.SubscriberConfig{
		ConsumerGroup: "billing", OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{}, InitializeSchema: true,
	}
	if !shape.Defaults {
		schema.SubscribeBatchSize = 1000
		config.PollInterval = time.Millisecond
	}
	config.SchemaAdapter = schema
	logger := watermill.NopLogger{}
	if s.subscriber, err = wsql.NewSubscriber(wsql.BeginnerFromPgx(s.consumers), config, logger); err != nil {
		return nil, err
	}
	if err := s.subscriber.SubscribeInitialize("orders"); err != nil {
		return nil, err
	}
	s.publisher, err = wsql.NewPublisher(wsql.BeginnerFromPgx(s.producers), wsql.PublisherConfig{SchemaAdapter: schema}, logger)
	return s, err
}

func (s *watermillSystem) Produce(ctx context.Context, orders []Order) error {
	messages := make([]*message.Message, len(orders))
	for i := range orders {
		payload, err := json.Marshal(&orders[i])
		if err != nil {
			return err
		}
		messages[i] = message.NewMessageWithContext(ctx, watermill.NewUUID(), payload)
	}
	return s.publisher.Publish("orders", messages...)
}

func (s *watermillSystem) Consume(ctx context.Context, handle func(*Order)) error {
	messages, err := s.subscriber.Subscribe(ctx, "orders")
	if err != nil {
		return err
	}
	for m := range messages {
		var o Order
		if err := json.Unmarshal(m.Payload, &o); err != nil {
			return err
		}
		handle(&o)
		m.Ack()
	}
	return ctx.Err()
}

func (s *watermillSystem) Close() {
	_ = s.subscriber.Close() // never fails
	s.producers.Close()
	s.consumers.Close()
}
