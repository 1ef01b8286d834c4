package main

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/weirhq/weir"
)

func init() {
	register(Workload{
		Name:     "wakeups",
		Short:    "64 callers that produce in transactions of their own, each commit followed by a wake-up or by none",
		Settings: compared,
		Run:      wakeups,
		Plots:    []Plot{{Title: "Transactions a second", Figures: []string{"committed"}}},
	})
}

// wakeups shows what NOTIFY costs those that commit. A connection listens, as a consumer's would; nobody consumes.
func wakeups(ctx context.Context, e *Env) error {
	const callers = 64
	length := e.For(4*time.Second, 500*time.Millisecond)
	e.Parameter("callers", callers)
	e.Parameter("length of a turn", length.String())
	dsn, err := e.Database(ctx)
	if err != nil {
		return err
	}
	p, err := pool(ctx, dsn, callers+2)
	if err != nil {
		return err
	}
	defer p.Close()
	client, err := weir.New(p, &weir.Options{Logger: quiet(), NoMaintenance: true})
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.Migrate(ctx); err != nil {
		return err
	}
	if err := client.CreateTopic(ctx, "orders", nil); err != nil {
		return err
	}
	if _, err := p.Exec(ctx, "create table business (id bigint generated always as identity primary key, at timestamptz default now())"); err != nil {
		return err
	}
	listener, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() { _ = listener.Close(context.WithoutCancel(ctx)) }()
	if _, err := listener.Exec(ctx, `listen "weir:weir"`); err != nil {
		return err
	}
	heard := make(chan int, 1)
	listening, stop := context.WithCancel(ctx)
	go func() {
		n := 0
		for {
			if _, err := listener.WaitForNotification(listening); err != nil {
				heard <- n
				return
			}
			n++
		}
	}()
	message := weir.Message{Payload: json.RawMessage(`{"order":4711,"customer":"c-000042","amount":12.5,"currency":"EUR"}`)}
	turn := func(wake bool) (float64, error) {
		var committed atomic.Int64
		began := time.Now()
		var group errgroup.Group
		for range callers {
			group.Go(func() error {
				for time.Since(began) < length && ctx.Err() == nil {
					err := pgx.BeginFunc(ctx, p, func(tx pgx.Tx) error {
						if _, err := tx.Exec(ctx, "insert into business default values"); err != nil {
							return err
						}
						_, err := client.ProduceTx(ctx, tx, "orders", message)
						return err
					})
					if err != nil {
						return err
					}
					if wake {
						client.Wake("orders")
					}
					committed.Add(1)
				}
				return nil
			})
		}
		err := group.Wait()
		return float64(committed.Load()) / time.Since(began).Seconds(), err
	}
	if _, err := turn(true); err != nil { // plans and connections
		stop()
		return err
	}
	for i := range e.Runs(10, 2) {
		rate := map[bool]float64{}
		for _, wake := range []bool{i%2 == 0, i%2 != 0} {
			r, err := turn(wake)
			if err != nil {
				stop()
				return err
			}
			rate[wake] = r
		}
		e.Record("committed, with wake-ups", "transactions/s", rate[true])
		e.Record("committed, without", "transactions/s", rate[false])
		e.Record("with wake-ups against without", "x", rate[true]/rate[false])
	}
	stop()
	n := <-heard
	e.Record("wake-ups heard", "", float64(n))
	e.Target("wake-ups heard", "> 0", float64(n), n > 0)
	e.AtLeast("with wake-ups against without", 0.95)
	return nil
}
