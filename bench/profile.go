package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
)

// profiledSettings are a workload's settings with what profiling needs.
func profiledSettings(settings map[string]string) map[string]string {
	settings = maps.Clone(settings)
	if settings == nil {
		settings = map[string]string{}
	}
	maps.Copy(settings, statementSettings)
	settings["pg_stat_statements.track"] = "all"
	return settings
}

// statementSettings have the server count and time statements.
var statementSettings = map[string]string{
	"shared_preload_libraries": "pg_stat_statements", "track_wal_io_timing": "on", "track_io_timing": "on",
}

// profile records what this program spends its time on, and what the server does and waits for. stop writes it all to a folder:
// NAME.cpu for "go tool pprof", and NAME.server.txt. Figures taken meanwhile are a little lower.
func (e *Env) profile(ctx context.Context, folder, name string) (stop func(), err error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, e.Server.DSN("postgres"))
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, "create extension pg_stat_statements"); err != nil {
		return nil, err
	}
	cpu, err := os.Create(filepath.Join(folder, name+".cpu"))
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return nil, err
	}
	e.Parameter("profiled", true)
	sampling, cancel := context.WithCancel(ctx)
	sampled := make(chan map[string]int, 1)
	go func() { sampled <- waits(sampling, conn) }()
	return func() {
		pprof.StopCPUProfile()
		cancel()
		seen := <-sampled
		_ = cpu.Close()
		err := e.writeServerProfile(context.WithoutCancel(ctx), filepath.Join(folder, name+".server.txt"), seen)
		if err != nil {
			e.Logf("bench: %v", err)
		}
	}, nil
}

// waits counts, a hundred times a second, what busy server processes wait for, and what they run.
func waits(ctx context.Context, conn *pgx.Conn) map[string]int {
	defer conn.Close(context.WithoutCancel(ctx))
	seen := map[string]int{}
	for ctx.Err() == nil {
		rows, err := conn.Query(ctx, `
			select coalesce(wait_event_type || ':' || wait_event, 'CPU') || E'\t' || case
				when backend_type = 'client backend' then left(regexp_replace(query, '\s+', ' ', 'g'), 60) else backend_type end
			from pg_stat_activity
			where pid <> pg_backend_pid() and (state = 'active' or state is null and wait_event_type is distinct from 'Activity')`)
		if err != nil {
			break
		}
		var what string
		if _, err := pgx.ForEachRow(rows, []any{&what}, func() error { seen[what]++; return nil }); err != nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	return seen
}

func (e *Env) writeServerProfile(ctx context.Context, file string, seen map[string]int) error {
	conn, err := pgx.Connect(ctx, e.Server.DSN("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	table := tabwriter.NewWriter(f, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "samples\twaits for\twhile it runs")
	for _, what := range slices.SortedFunc(maps.Keys(seen), func(a, b string) int { return seen[b] - seen[a] }) {
		fmt.Fprintf(table, "%d\t%s\n", seen[what], what)
	}
	fmt.Fprintln(table, "\ncalls\ttotal ms\tmean us\tWAL bytes\ttop\tstatement")
	rows, err := conn.Query(ctx, `
		select sum(calls)::bigint, sum(total_exec_time), sum(total_exec_time) / sum(calls) * 1000, sum(wal_bytes)::bigint, toplevel,
			left(regexp_replace(query, '\s+', ' ', 'g'), 140)
		from pg_stat_statements
		group by toplevel, query
		order by 2 desc
		limit 60`)
	if err != nil {
		return err
	}
	var (
		calls, wal  int64
		total, mean float64
		top         bool
		query       string
	)
	if _, err := pgx.ForEachRow(rows, []any{&calls, &total, &mean, &wal, &top, &query}, func() error {
		fmt.Fprintf(table, "%d\t%.0f\t%.1f\t%d\t%v\t%s\n", calls, total, mean, wal, top, query)
		return nil
	}); err != nil {
		return err
	}
	return table.Flush()
}
