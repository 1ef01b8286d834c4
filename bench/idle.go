package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"os"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/weirhq/weir"
)

func init() {
	settings := maps.Clone(compared)
	maps.Copy(settings, statementSettings)
	settings["autovacuum"] = "off" // it works by the clock, and would be taken for the consumers' work
	register(Workload{
		Name:     "idle",
		Short:    "statements, transactions and processor time of consumers that have nothing to do: 1 and 20 groups",
		Settings: settings,
		Run:      idle,
		Plots:    []Plot{{Title: "Nothing to do", Figures: []string{"server CPU", "consumer CPU"}}},
	})
}

const idleGroups = 20

// idle counts what a process with one consumer costs, and one with twenty, over what the server does all by itself.
func idle(ctx context.Context, e *Env) error {
	if err := e.extension("pg_stat_statements"); err != nil {
		return fmt.Errorf("%w\ninstall it: apt-get install postgresql-contrib (Debian)", err)
	}
	length := e.For(30*time.Second, time.Second)
	e.Parameter("length", length.String())
	for range e.Runs(3, 1) {
		alone, err := idleOnce(ctx, e, 0, length)
		if err != nil {
			return err
		}
		of := map[int]idleCost{}
		for _, groups := range []int{1, idleGroups} {
			c, err := idleOnce(ctx, e, groups, length)
			if err != nil {
				return fmt.Errorf("%d groups: %w", groups, err)
			}
			c.server -= alone.server
			c.client -= alone.client
			c.xids -= alone.xids
			of[groups] = c
			name := ", 1 group"
			if groups > 1 {
				name = fmt.Sprintf(", %d groups", groups)
			}
			e.Record("statements"+name, "1/s", c.statements)
			e.Record("transactions"+name, "1/s", c.transactions)
			e.Record("xids"+name, "1/s", c.xids)
			e.Record("server CPU"+name, "% of a core", c.server)
			e.Record("consumer CPU"+name, "% of a core", c.client)
		}
		// In hundredths: the window's ends fall between two polls or do not.
		e.Record("statements of a group", "1/s", math.Round(100*of[idleGroups].statements/idleGroups)/100)
		e.Record("xids of a process", "1/s", of[1].xids)
		e.Record("CPU of a process with its part of the server", "% of a core", of[1].server+of[1].client)
		e.Record("server CPU of one more group", "% of a core", (of[idleGroups].server-of[1].server)/(idleGroups-1))
	}
	e.AtMost("statements of a group", 1)
	e.AtMost("xids of a process", 0)
	e.AtMost("CPU of a process with its part of the server", 0.5)
	return nil
}

// idleCost is what happened a second; processor time as a percentage of one core.
type idleCost struct {
	statements, transactions, xids, server, client float64
}

func idleOnce(ctx context.Context, e *Env, groups int, length time.Duration) (idleCost, error) {
	defer e.dropDatabases(ctx)
	client, dsn, err := e.Open(ctx, nil)
	if err != nil {
		return idleCost{}, err
	}
	defer client.Close()
	if err := client.CreateTopic(ctx, "orders", nil); err != nil {
		return idleCost{}, err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	var consumers errgroup.Group
	for g := range groups {
		name := fmt.Sprintf("group-%d", g)
		if err := client.CreateGroup(ctx, "orders", name, nil); err != nil {
			return idleCost{}, err
		}
		k, err := client.NewConsumer("orders", name, weir.Handle(func(context.Context, *weir.Received[Order]) error { return nil }), nil)
		if err != nil {
			return idleCost{}, err
		}
		consumers.Go(func() error { return k.Run(running) })
	}
	// It has had something to do, and is done with it.
	for range 10 {
		if _, err := client.Produce(ctx, "orders", weir.Message{Payload: Order{}}); err != nil {
			return idleCost{}, err
		}
	}
	observer, err := pgx.Connect(ctx, e.Server.DSN("postgres"))
	if err != nil {
		return idleCost{}, err
	}
	defer observer.Close(context.WithoutCancel(ctx))
	if _, err := observer.Exec(ctx, "create extension if not exists pg_stat_statements"); err != nil {
		return idleCost{}, err
	}
	name, err := pgx.ParseConfig(dsn)
	if err != nil {
		return idleCost{}, err
	}
	runtime.GC() // not within the time that is measured
	select {
	case <-ctx.Done():
		return idleCost{}, ctx.Err()
	case <-time.After(e.For(2*time.Second, 500*time.Millisecond)):
	}
	before, err := idleState(ctx, e, observer, name.Database)
	if err != nil {
		return idleCost{}, err
	}
	began := time.Now()
	select {
	case <-ctx.Done():
		return idleCost{}, ctx.Err()
	case <-time.After(length):
	}
	took := time.Since(began).Seconds()
	after, err := idleState(ctx, e, observer, name.Database)
	if err != nil {
		return idleCost{}, err
	}
	stop()
	return idleCost{
		statements:   (after.statements - before.statements) / took,
		transactions: (after.transactions - before.transactions) / took,
		xids:         (after.xids - before.xids) / took,
		server:       100 * (after.server - before.server) / took,
		client:       100 * (after.client - before.client) / took,
	}, consumers.Wait()
}

func idleState(ctx context.Context, e *Env, observer *pgx.Conn, database string) (s idleCost, err error) {
	// A backend hands its counts of transactions in when it has been idle for a while, a second at the most.
	err = observer.QueryRow(ctx, `
		select
			(
				select coalesce(sum(s.calls), 0)::float8
				from pg_stat_statements as s
				join pg_database as d on d.oid = s.dbid
				where d.datname = $1 and s.toplevel
			),
			(select xact_commit::float8 from pg_stat_database where datname = $1),
			pg_snapshot_xmax(pg_current_snapshot())::text::float8`,
		database).Scan(&s.statements, &s.transactions, &s.xids)
	if err != nil {
		return s, err
	}
	own, err := cpuTime(os.Getpid())
	if err != nil {
		return s, err
	}
	s.client = own.Seconds()
	processes, err := childrenOf(e.Server.PID())
	if err != nil {
		return s, err
	}
	for _, pid := range processes {
		if pid == int(observer.PgConn().PID()) {
			continue
		}
		t, err := cpuTime(pid)
		if err != nil {
			continue // it has ended
		}
		s.server += t.Seconds()
	}
	return s, nil
}
