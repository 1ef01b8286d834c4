package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// Env is what a workload runs in: a private server, and a result to fill. Its methods may be called from any goroutine.
type Env struct {
	// Size says how much to do: see Runs and For.
	Size Size
	// Server is the workload's own server, with durable commits. It is stopped, and its data removed, when Run returns.
	Server *pgtest.Server

	workload Workload
	// only are the peers that were asked for by name; none: all that the workload has
	only []string

	mu        sync.Mutex
	result    *Result
	clients   []*weir.Client
	databases int
	present   []string // databases that were not dropped yet
}

// Size is how much a workload does.
type Size string

// Full is what results are taken from. Short does half of it or less, so that a round of all workloads is bearable, and its figures are
// about right. Quick is a smoke run: everything is tried, within about ten seconds, and figures mean little.
const (
	Full  Size = "full"
	Short Size = "short"
	Quick Size = "quick"
)

func newEnv(ctx context.Context, w Workload, size Size, only []string, r *Result) (*Env, error) {
	server, err := pgtest.Start(ctx, &pgtest.Options{Settings: w.Settings})
	if err != nil {
		return nil, err
	}
	return &Env{Size: size, Server: server, workload: w, only: only, result: r}, nil
}

func (e *Env) close() {
	for _, c := range e.clients {
		c.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := e.Server.Stop(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
	}
}

// Database makes an empty database and returns its DSN.
func (e *Env) Database(ctx context.Context) (dsn string, err error) {
	e.mu.Lock()
	e.databases++
	name := fmt.Sprintf("bench_%d", e.databases)
	e.present = append(e.present, name)
	e.mu.Unlock()
	if err := e.Server.CreateDatabase(ctx, name); err != nil {
		return "", err
	}
	return e.Server.DSN(name), nil
}

// Open makes an empty database, installs Weir in it, and returns a client and the database's DSN. A nil o means the
// defaults. The client is closed when Run has returned: a consumer must have been stopped by then.
func (e *Env) Open(ctx context.Context, o *weir.Options) (*weir.Client, string, error) {
	dsn, err := e.Database(ctx)
	if err != nil {
		return nil, "", err
	}
	c, err := e.Connect(ctx, dsn, o)
	return c, dsn, err
}

// Connect opens one more client on a database; otherwise as Open.
func (e *Env) Connect(ctx context.Context, dsn string, o *weir.Options) (*weir.Client, error) {
	var own weir.Options
	if o != nil {
		own = *o
	}
	own.Migrate = true
	if own.Logger == nil {
		own.Logger = quiet()
	}
	c, err := weir.Open(ctx, dsn, &own)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.clients = append(e.clients, c)
	return c, nil
}

// dropDatabases drops the databases made so far, with what is in them.
func (e *Env) dropDatabases(ctx context.Context) {
	e.mu.Lock()
	names := e.present
	e.present = nil
	e.mu.Unlock()
	for _, name := range names {
		if err := e.Server.DropDatabase(ctx, name); err != nil && ctx.Err() == nil {
			e.Logf("bench: %v", err)
		}
	}
}

// extension reports what is wrong if a database cannot have an extension.
func (e *Env) extension(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := e.extensionVersion(ctx, name)
	return err
}

// extensionVersion is the version of an extension that a database would get.
func (e *Env) extensionVersion(ctx context.Context, name string) (version string, err error) {
	conn, err := pgx.Connect(ctx, e.Server.DSN("postgres"))
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = conn.QueryRow(ctx, "select default_version from pg_available_extensions where name = $1", name).Scan(&version)
	if errors.Is(err, pgx.ErrNoRows) {
		err = fmt.Errorf("PostgreSQL %d has no extension %s", e.Server.Binaries().Major, name)
	}
	return version, err
}

// quiet is a logger that says only what is wrong.
func quiet() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// Runs is how many runs to make, or how much of something to do: full, half of that in a short run, quick in a smoke run.
func (e *Env) Runs(full, quick int) int {
	switch e.Size {
	case Quick:
		return quick
	case Short:
		return max(quick, full/2)
	}
	return full
}

// For is how long to measure: full, half of that in a short run, quick in a smoke run.
func (e *Env) For(full, quick time.Duration) time.Duration {
	return time.Duration(e.Runs(int(full), int(quick)))
}

// Parameter puts what the workload did into the result, such as the number of producers.
func (e *Env) Parameter(name string, value any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.result.Parameters[name] = value
}

// Record adds the figure of one run to a series. Call it once a run for each series; the result has all of them, with their
// median and spread.
func (e *Env) Record(series, unit string, value float64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.result.Series {
		if s.Name == series {
			s.Values = append(s.Values, value)
			return
		}
	}
	e.result.Series = append(e.result.Series, &Series{Name: series, Unit: unit, Values: []float64{value}})
}

// version says which version of a peer is measured.
func (e *Env) version(peer, version string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.result.Peers == nil {
		e.result.Peers = map[string]string{}
	}
	e.result.Peers[peer] = version
}

// AtLeast sets a target for the median of a series. Without the series, because a peer was left out, there is none.
func (e *Env) AtLeast(series string, limit float64) {
	e.bound(series, ">=", limit, func(v float64) bool { return v >= limit })
}

// AtMost is AtLeast for what is better the less it is.
func (e *Env) AtMost(series string, limit float64) {
	e.bound(series, "<=", limit, func(v float64) bool { return v <= limit })
}

func (e *Env) bound(name, relation string, limit float64, holds func(float64) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, s := range e.result.Series {
		if s.Name != name {
			continue
		}
		s.finish()
		unit := strings.TrimPrefix(" "+s.Unit, " x")
		e.result.Targets = append(e.result.Targets, Target{
			Name: name, Want: relation + " " + short(limit) + unit, Got: short(s.Median) + unit, Passed: holds(s.Median),
		})
	}
}

// Target says what had to be reached and whether it was: Target("never delivered", "= 0", lost, lost == 0). A workload with a
// target that is missed ends with exit code 1.
func (e *Env) Target(name, want string, got any, passed bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.result.Targets = append(e.result.Targets, Target{Name: name, Want: want, Got: got, Passed: passed})
}

// Logf tells whoever waits what goes on, on stderr. It is no part of the result.
func (e *Env) Logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
}

// settings reads the server's version, and those settings that a figure depends on or that are not the default.
func (e *Env) settings(ctx context.Context) (version string, settings map[string]string, err error) {
	conn, err := pgx.Connect(ctx, e.Server.DSN("postgres"))
	if err != nil {
		return "", nil, err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	rows, err := conn.Query(ctx, `
		select name, current_setting(name)
		from pg_settings
		where name in ('server_version', 'fsync', 'synchronous_commit', 'full_page_writes', 'wal_level', 'shared_buffers',
			'max_connections', 'work_mem', 'max_wal_size', 'jit', 'autovacuum', 'wal_sync_method', 'commit_delay')
		or source = 'configuration file' and name not in ('port', 'listen_addresses')
			and name !~ 'director|_file|^lc_|^log_|^timezone|TimeZone|DateStyle|text_search'`)
	if err != nil {
		return "", nil, err
	}
	settings = map[string]string{}
	var name, value string
	_, err = pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		settings[name] = value
		return nil
	})
	version = settings["server_version"]
	delete(settings, "server_version")
	return version, settings, err
}

// discard takes all figures back: those of a wrong result mean nothing.
func (e *Env) discard() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.result.Series = []*Series{}
}
