package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

func init() {
	registerPeer(Peer{
		Name:    "river",
		Short:   "River: InsertManyFast (Insert for a single message), 500 workers that look every millisecond (with defaults: 100 workers)",
		Version: moduleVersion("github.com/riverqueue/river"),
		Open:    openRiver,
	})
}

// Kind implements river.JobArgs.
func (Order) Kind() string { return "order" }

type riverSystem struct {
	producers, consumers *pgxpool.Pool
	insert               *river.Client[pgx.Tx]
	shape                Shape
}

type riverWorker struct {
	river.WorkerDefaults[Order]
	handle func(*Order)
}

func (w *riverWorker) Work(_ context.Context, job *river.Job[Order]) error {
	w.handle(&job.Args)
	return nil
}

func openRiver(ctx context.Context, e *Env, shape Shape) (System, error) {
	dsn, err := e.Database(ctx)
	if err != nil {
		return nil, err
	}
	s := &riverSystem{shape: shape}
	if s.producers, err = pool(ctx, dsn, shape.Callers); err != nil {
		return nil, err
	}
	if s.consumers, err = pool(ctx, dsn, consumerConns); err != nil {
		return nil, err
	}
	migrator, err := rivermigrate.New(riverpgxv5.New(s.producers), &rivermigrate.Config{Logger: quiet()})
	if err != nil {
		return nil, err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return nil, err
	}
	s.insert, err = river.NewClient(riverpgxv5.New(s.producers), &river.Config{Logger: quiet()})
	return s, err
}

func (s *riverSystem) Produce(ctx context.Context, orders []Order) error {
	if len(orders) == 1 {
		_, err := s.insert.Insert(ctx, orders[0], nil)
		return err
	}
	params := make([]river.InsertManyParams, len(orders))
	for i := range orders {
		params[i].Args = orders[i]
	}
	_, err := s.insert.InsertManyFast(ctx, params)
	return err
}

func (s *riverSystem) Consume(ctx context.Context, handle func(*Order)) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{handle: handle})
	config := &river.Config{
		Logger: quiet(), Workers: workers,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 500}},
	}
	if s.shape.Defaults {
		config.Queues[river.QueueDefault] = river.QueueConfig{MaxWorkers: 100}
	} else {
		config.FetchCooldown, config.FetchPollInterval = time.Millisecond, time.Millisecond
	}
	client, err := river.NewClient(riverpgxv5.New(s.consumers), config)
	if err != nil {
		return err
	}
	if err := client.Start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	<-ctx.Done()
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	return client.StopAndCancel(stopping)
}

func (s *riverSystem) Close() {
	s.producers.Close()
	s.consumers.Close()
}
