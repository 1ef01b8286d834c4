package main

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
)

func init() {
	settings := maps.Clone(compared)
	maps.Copy(settings, statementSettings)
	register(Workload{
		Name:     "claim",
		Short:    "one cycle of claim, fetch and acknowledgement: server time, round trips and flushes; with 1 ms and 5 ms of network delay",
		Settings: settings,
		Run:      claim,
		Plots:    []Plot{{Title: "One cycle of a consumer", Figures: []string{"cycle", "server", "select 1"}}},
	})
}

// claim divides the time of a consumer that does nothing but claim. What a cycle costs beyond the server's time is its round trips, and
// what those cost is the network's.
func claim(ctx context.Context, e *Env) error {
	if err := e.extension("pg_stat_statements"); err != nil {
		return fmt.Errorf("%w\ninstall it: apt-get install postgresql-contrib (Debian)", err)
	}
	n := e.Runs(600, 60)
	e.Parameter("cycles", n)
	e.Parameter("messages a cycle", 1)
	lost := 0
	for range e.Runs(3, 1) {
		var base, one time.Duration // without delay, through the proxy
		for _, c := range []struct {
			name    string
			proxied bool
			delay   time.Duration
		}{{"local", false, 0}, {"proxy", true, 0}, {"1 ms", true, time.Millisecond}, {"5 ms", true, 5 * time.Millisecond}} {
			m, err := claimOnce(ctx, e, n, c.proxied, c.delay)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			lost += m.missed
			cycle := quantile(m.took, 0.5)
			e.Record("cycle, "+c.name, "us", microseconds(cycle))
			e.Record("server, "+c.name, "us", m.server)
			e.Record("select 1, "+c.name, "us", microseconds(m.one))
			e.Record("round trips, "+c.name, "a cycle", m.trips)
			e.Record("flushes, "+c.name, "a cycle", m.flushes)
			e.Record("flushing, "+c.name, "us a cycle", m.flushing)
			switch {
			case c.proxied && c.delay == 0:
				base, one = cycle, m.one
			case c.delay > 0:
				// What a delay comes to is what it adds to "select 1".
				e.Record("delays a cycle at "+c.name, "delays", float64(cycle-base)/float64(m.one-one))
			}
		}
	}
	account{"weir": lost}.close(e)
	// A timer's lateness is no round trip.
	e.AtMost("delays a cycle at 5 ms", 2.1)
	return nil
}

type claimed struct {
	cycled
	one               time.Duration // "select 1" over the same connection
	server            float64       // us a cycle that the server executes statements
	flushes, flushing float64       // flushes of the log, and us of them, a cycle: nobody else writes
}

func claimOnce(ctx context.Context, e *Env, n int, proxied bool, delay time.Duration) (claimed, error) {
	defer e.dropDatabases(ctx)
	client, dsn, err := e.Open(ctx, &weir.Options{NoListen: true})
	if err != nil {
		return claimed{}, err
	}
	defer client.Close()
	if err := client.CreateTopic(ctx, "orders", nil); err != nil {
		return claimed{}, err
	}
	if err := client.CreateGroup(ctx, "orders", "billing", nil); err != nil {
		return claimed{}, err
	}
	_, err = client.Copy(ctx, "orders", func(yield func(weir.Message, error) bool) {
		for _, o := range newTally(n).orders(n) {
			if !yield(weir.Message{Payload: o}, nil) {
				return
			}
		}
	})
	if err != nil {
		return claimed{}, err
	}
	var through *proxy
	if proxied {
		if through, err = newProxy(dsn, delay); err != nil {
			return claimed{}, err
		}
		defer func() { _ = through.close() }()
	}
	w := &wire{}
	p, err := w.pool(ctx, dsn, consumerConns, through, nil)
	if err != nil {
		return claimed{}, err
	}
	defer p.Close()
	consumer, err := weir.New(p, &weir.Options{NoListen: true, Logger: quiet()})
	if err != nil {
		return claimed{}, err
	}
	defer consumer.Close()
	ones, err := selectOne(ctx, p, e.Runs(300, 50))
	if err != nil {
		return claimed{}, err
	}

	observer, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return claimed{}, err
	}
	defer observer.Close(context.WithoutCancel(ctx))
	for _, step := range []string{
		"create extension if not exists pg_stat_statements", "checkpoint", "select pg_stat_statements_reset()", "select pg_stat_reset_shared('wal')",
	} {
		if _, err := observer.Exec(ctx, step); err != nil {
			return claimed{}, err
		}
	}
	r := claimed{one: quantile(ones, 0.5)}
	if r.cycled, err = cycles(ctx, consumer, w, "orders", "billing", n); err != nil {
		return r, err
	}
	err = observer.QueryRow(ctx, `
		select sum(s.total_exec_time + s.total_plan_time) * 1000, max(w.wal_sync), max(w.wal_sync_time) * 1000
		from pg_stat_statements as s
		join pg_database as d on d.oid = s.dbid and d.datname = current_database()
		cross join pg_stat_wal as w
		where s.toplevel`).Scan(&r.server, &r.flushes, &r.flushing)
	for _, v := range []*float64{&r.server, &r.flushes, &r.flushing} {
		*v /= float64(n)
	}
	return r, err
}
