package weirwatermill_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
)

// restartArgument makes the test binary a program that has another one restart its server: what the suite can run as a command.
const restartArgument = "restart-server"

var server *pgtest.Server

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == restartArgument {
		if err := askForRestart(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	ctx := context.Background()
	var err error
	server, err = pgtest.Start(ctx, &pgtest.Options{Fast: true, Settings: map[string]string{"max_connections": "400"}})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	pgtest.OnCleanup(checkInvariants)
	if !testing.Verbose() {
		log.SetOutput(io.Discard) // the suite tells of each bulk read
	}
	code := m.Run()
	if err := server.Stop(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

// checkInvariants runs every invariant against the install in a database that is about to be dropped.
func checkInvariants(t pgtest.TB, dsn string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := weir.Open(ctx, dsn, &weir.Options{NoListen: true, NoMaintenance: true})
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	defer c.Close()
	results, err := c.Check(ctx)
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	for _, r := range results {
		if len(r.Violations) > 0 {
			t.Fatalf("%s (%s): %s", r.Name, r.Holds, strings.Join(r.Violations, "; "))
		}
	}
}

// quiet is the logger of clients whose server is restarted, and whose consumers are stopped in the midst of things.
var quiet = slog.New(slog.DiscardHandler)

// database gives a pool on an empty database of the server, with Weir installed.
func database(t *testing.T, s *pgtest.Server) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(s.Database(t))
	noError(t, err)
	config.MaxConns = 30
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	noError(t, err)
	t.Cleanup(pool.Close)
	c, err := weir.New(pool, nil)
	noError(t, err)
	defer c.Close()
	noError(t, c.Migrate(t.Context()))
	return pool
}

// client gives a client of its own on a pool.
func client(t *testing.T, pool *pgxpool.Pool) *weir.Client {
	t.Helper()
	c, err := weir.New(pool, &weir.Options{Logger: quiet})
	noError(t, err)
	t.Cleanup(c.Close)
	return c
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func isError(t *testing.T, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("error %v, want %v", err, want)
	}
}

// restartCommand gives a command that restarts a server of this process. It asks this process by a socket, since nobody else knows how
// the server was started.
func restartCommand(t *testing.T, s *pgtest.Server) []string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	noError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			answer := "done"
			if err := s.Restart(context.Background()); err != nil {
				answer = err.Error()
			}
			_, _ = io.WriteString(conn, answer)
			_ = conn.Close()
		}
	}()
	binary, err := os.Executable()
	noError(t, err)
	return []string{binary, restartArgument, listener.Addr().String()}
}

func askForRestart(address string) error {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(conn)
	if err == nil && string(answer) != "done" {
		err = errors.New(string(answer))
	}
	return err
}
