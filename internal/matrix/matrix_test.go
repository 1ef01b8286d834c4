package matrix

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/sql/testdata"
)

var (
	full   = flag.Bool("full", false, "run every cell, on every server of servers.txt, instead of a few on the one that is installed")
	update = flag.Bool("update", false, "with -full: write result.json, and the table into docs/operations.md")
)

const (
	resultFile = "result.json"
	document   = "../../docs/operations.md"
	// atOnce is how many cells run at once.
	atOnce = 4
)

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

func nameOf(mode pgx.QueryExecMode) string { return strings.ReplaceAll(mode.String(), " ", "_") }

// way is a way to a server: directly, or through a pooler.
type way struct {
	name   string
	pooler Pooler
	pool   *Pool
}

func (w way) dsn(server *pgtest.Server, database string, mode pgx.QueryExecMode) string {
	if w.pool == nil {
		return withMode(server.DSN(database), mode)
	}
	return w.pool.DSN(database, mode)
}

// fits reports whether a mode works through it at all.
//
// cache_statement prepares statements under names, on the server connection that it happens to have. describe_exec prepares the one
// without a name in one round trip and executes it in the next, when the connection may have been another client's in between; no
// version of PgBouncer carries that statement over.
func (w way) fits(mode pgx.QueryExecMode) bool {
	switch mode {
	case pgx.QueryExecModeCacheStatement:
		return w.pool == nil || w.pooler.Prepared
	case pgx.QueryExecModeDescribeExec:
		return w.pool == nil
	default:
		return true
	}
}

var databases atomic.Int64

// try runs one cell.
func try(ctx context.Context, server *pgtest.Server, w way, mode pgx.QueryExecMode, synchronous bool) CellResult {
	began := time.Now()
	r := CellResult{Server: server.Binaries().Version, Way: w.name, Mode: nameOf(mode), Synchronous: synchronous, Outcome: Passed}
	err := func() (err error) {
		database := fmt.Sprintf("cell_%d", databases.Add(1))
		if err := server.CreateDatabase(ctx, database); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, server.DropDatabase(context.WithoutCancel(ctx), database)) }()
		setting := map[bool]string{true: "on", false: "off"}[synchronous]
		if err := server.Exec(ctx, "postgres", "alter database "+database+" set synchronous_commit = "+setting); err != nil {
			return err
		}
		dsn := w.dsn(server, database, mode)
		if !w.fits(mode) {
			r.Outcome = Unfit
			r.Code, err = misfit(ctx, dsn, mode)
			return err
		}
		r.Handled, err = Cell{Direct: server.DSN(database), DSN: dsn, Pooled: w.pool != nil, Synchronous: setting}.Run(ctx)
		return err
	}()
	if err != nil {
		r.Outcome, r.Error = Failed, err.Error()
	}
	r.Seconds = float64(time.Since(began).Round(100*time.Millisecond)) / float64(time.Second)
	return r
}

// misfit shows what goes wrong with a mode that does not fit a pooler, by what two clients send in turn. It gives the SQLSTATE.
func misfit(ctx context.Context, dsn string, mode pgx.QueryExecMode) (string, error) {
	var clients [2]*pgx.Conn
	for i := range clients {
		var err error
		if clients[i], err = pgx.Connect(ctx, dsn); err != nil {
			return "", err
		}
		defer clients[i].Close(ctx)
	}
	var err error
	if mode == pgx.QueryExecModeCacheStatement {
		for _, c := range clients {
			var n int
			err = c.QueryRow(ctx, "select $1::int", 1).Scan(&n)
		}
	} else {
		for i, text := range []string{"select $1::int", "select $1::int, $2::int"} {
			if _, err := clients[i].PgConn().Prepare(ctx, "", text, nil); err != nil {
				return "", err
			}
		}
		_, err = clients[0].PgConn().ExecPrepared(ctx, "", [][]byte{[]byte("1")}, nil, nil).Close()
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return "", fmt.Errorf("%s was to fail through this pooler, but ended with: %w", nameOf(mode), err)
	}
	return pg.Code, nil
}

// TestMatrix runs cells. Without -full: directly and through the PgBouncer that is installed, in two query modes each.
func TestMatrix(t *testing.T) {
	if *full {
		testFull(t)
		return
	}
	server := pgtest.New(t, &pgtest.Options{Fast: true})
	ways := []way{{name: "direct"}}
	pooler, err := FindPooler()
	if err == nil {
		pool, err := pooler.Start(t.Context(), server, 6432)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Stop)
		ways = append(ways, way{pooler.String(), pooler, pool})
	}
	if err != nil {
		t.Run("pooler", func(t *testing.T) { t.Skip(err) })
	}
	// All at once: a cell waits more than it works.
	var cells sync.WaitGroup
	for _, w := range ways {
		for i, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
			// The default, or what takes its place where there are no prepared statements.
			if i == 0 && !w.fits(mode) || i == 1 && w.fits(pgx.QueryExecModeCacheStatement) {
				continue
			}
			cells.Go(func() {
				r := try(t.Context(), server, w, mode, i == 2)
				if r.Outcome == Failed {
					t.Errorf("%s, %s: %s", r.Way, r.Mode, r.Error)
				}
				t.Logf("%s, %s: %d messages handled in %.1f s", r.Way, r.Mode, r.Handled, r.Seconds)
			})
		}
	}
	cells.Wait()
}

// TestCellFinds: on an install that has a seeded bug of sql/testdata/bugs.txt, a cell fails.
func TestCellFinds(t *testing.T) {
	server := pgtest.New(t, &pgtest.Options{Fast: true})
	bugs, err := testdata.Bugs()
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, bug := range bugs {
		if bug.Name != "raw-head" {
			continue // the others take peers, crashes or moments that a cell does not have
		}
		tried++
		t.Run(bug.Name, func(t *testing.T) {
			t.Parallel()
			database := fmt.Sprintf("bug_%d", databases.Add(1))
			if err := server.CreateDatabase(t.Context(), database); err != nil {
				t.Fatal(err)
			}
			dsn := server.DSN(database)
			c, err := weir.Open(t.Context(), dsn, &weir.Options{Migrate: true, NoListen: true, NoMaintenance: true})
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
			texts, err := bug.Texts()
			if err != nil {
				t.Fatal(err)
			}
			for _, text := range texts {
				if err := server.Exec(t.Context(), database, text); err != nil {
					t.Fatal(err)
				}
			}
			_, err = Cell{Direct: dsn, DSN: dsn, Guest: true}.Run(t.Context())
			if err == nil {
				t.Fatal("the cell found nothing")
			}
			first, _, _ := strings.Cut(err.Error(), "\n")
			t.Logf("found: %s", first)
		})
	}
	if tried == 0 {
		t.Error("the catalogue lacks the bug")
	}
}

func testFull(t *testing.T) {
	ctx := t.Context()
	servers, err := Servers()
	if err != nil {
		t.Fatal(err)
	}
	installed, err := FindPooler()
	if err != nil {
		t.Fatal(err)
	}
	poolers := []Pooler{installed}
	if newer, err := NewerPooler(ctx); err != nil {
		t.Fatal(err)
	} else if newer.Version != installed.Version {
		poolers = append(poolers, newer)
	}
	driver, err := pgxVersion(ctx)
	if err != nil {
		t.Fatal(err)
	}
	result := &Result{Date: time.Now().UTC().Format("2 January 2006"), Pgx: driver, Ways: []string{"direct"}}
	for _, m := range modes {
		result.Modes = append(result.Modes, nameOf(m))
	}
	for _, p := range poolers {
		result.Ways = append(result.Ways, p.String())
	}
	for _, s := range servers {
		bin, err := s.Fetch(ctx)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(s.Version, func(t *testing.T) { onServer(t, result, bin, poolers) })
	}
	result.sort()
	fmt.Println()
	if err := result.Table(os.Stdout); err != nil {
		t.Fatal(err)
	}
	if !*update {
		return
	}
	if err := os.WriteFile(resultFile, result.JSON(), 0o644); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	before, _, after, err := part(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(document, []byte(before+result.Markdown()+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// onServer runs all cells on one server, with commits that are durable, and then the scenarios of the fence on a server of its own.
func onServer(t *testing.T, result *Result, bin string, poolers []Pooler) {
	server := pgtest.New(t, &pgtest.Options{BinDir: bin})
	version := server.Binaries().Version
	result.Servers = append(result.Servers, version)
	ways := []way{{name: "direct"}}
	for i, p := range poolers {
		pool, err := p.Start(t.Context(), server, 6432+i)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Stop)
		ways = append(ways, way{p.String(), p, pool})
	}
	var (
		mu    sync.Mutex
		cells sync.WaitGroup
		slots = make(chan struct{}, atOnce)
	)
	for _, w := range ways {
		for _, mode := range modes {
			for _, synchronous := range []bool{true, false} {
				slots <- struct{}{}
				cells.Go(func() {
					defer func() { <-slots }()
					r := try(t.Context(), server, w, mode, synchronous)
					mu.Lock()
					defer mu.Unlock()
					result.Cells = append(result.Cells, r)
					fmt.Printf("PostgreSQL %-6s  %-17s  %-15s  synchronous_commit %-5v  %-6s  %s%5d handled  %4.1f s\n",
						r.Server, r.Way, r.Mode, r.Synchronous, r.Outcome, r.Code, r.Handled, r.Seconds)
					if r.Outcome == Failed {
						t.Fail()
						fmt.Println(r.Error)
					}
				})
			}
		}
	}
	cells.Wait()
	if t.Context().Err() != nil {
		t.Fatal(t.Context().Err())
	}
	s := fence(t.Context(), version, bin)
	result.Fence = append(result.Fence, s)
	fmt.Printf("PostgreSQL %-6s  TestFence  %d passed, %d failed\n", version, s.Passed, s.Failed)
	if s.Error != "" {
		t.Error(s.Error)
	}
}

// fence runs the scenarios of the fence on the server's binaries.
func fence(ctx context.Context, version, bin string) SuiteResult {
	cmd := exec.CommandContext(ctx, "go", "test", "-count=1", "-json", "-run", "^TestFence$", "../../sql")
	cmd.Env = append(os.Environ(), pgtest.BinEnv+"="+bin)
	cmd.WaitDelay = 10 * time.Second
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	r := SuiteResult{Server: version}
	var text strings.Builder
	for d := json.NewDecoder(bytes.NewReader(out)); d.More(); {
		var e struct{ Action, Test, Output string }
		if err := d.Decode(&e); err != nil {
			r.Error = err.Error()
			return r
		}
		text.WriteString(e.Output)
		if strings.Count(e.Test, "/") != 2 { // TestFence/scenario/mode
			continue
		}
		switch e.Action {
		case "pass":
			r.Passed++
		case "fail":
			r.Failed++
		}
	}
	if err != nil {
		r.Error = fmt.Sprintf("TestFence on PostgreSQL %s: %v\n%s%s", version, err, text.String(), complaints.String())
	}
	return r
}

func pgxVersion(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Version}}", "github.com/jackc/pgx/v5").Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	return strings.TrimPrefix(strings.TrimSpace(string(out)), "v"), nil
}

// Markers of the part of the document that a run of the matrix writes.
const (
	begin = "<!-- make matrix writes from here -->\n"
	end   = "<!-- to here -->\n"
)

// part cuts the document at the markers.
func part(text string) (before, within, after string, err error) {
	before, rest, found := strings.Cut(text, begin)
	within, after, closed := strings.Cut(rest, end)
	if !found || !closed {
		return "", "", "", fmt.Errorf("%s lacks the lines %q and %q", document, begin, end)
	}
	return before + begin, within, end + after, nil
}

// TestDocument: the table in docs/operations.md is that of result.json, in which nothing failed, and it has every server that is pinned.
func TestDocument(t *testing.T) {
	data, err := os.ReadFile(resultFile)
	if err != nil {
		t.Fatal(err)
	}
	var result Result
	if err := json.Unmarshal(data, &result); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	_, within, _, err := part(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if within != result.Markdown() {
		t.Errorf("%s has\n%s\n%s makes it\n%s", document, within, resultFile, result.Markdown())
	}
	if !result.OK() {
		t.Errorf("%s has failures", resultFile)
	}
	servers, err := Servers()
	if err != nil {
		t.Fatal(err)
	}
	if len(servers) != len(result.Servers) {
		t.Fatalf("%s has the servers %v, servers.txt %v", resultFile, result.Servers, servers)
	}
	for i, s := range servers {
		if !strings.HasPrefix(s.Version, result.Servers[i]+".") {
			t.Errorf("%s has PostgreSQL %s, servers.txt %s: run make matrix", resultFile, result.Servers[i], s.Version)
		}
	}
}
