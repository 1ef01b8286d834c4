//go:build unix

package pgtest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// childEnv makes the test binary start a server and wait to be killed.
const childEnv = "PGTEST_CHILD_DATA_DIR"

var hookRuns struct {
	name string // test databases whose name contains this are recorded
	dsns []string
	f    func(t TB, dsn string)
}

func TestMain(m *testing.M) {
	if dir, ok := os.LookupEnv(childEnv); ok {
		runChild(dir)
	}
	OnCleanup(func(t TB, dsn string) {
		if f := hookRuns.f; f != nil {
			f(t, dsn)
		}
	})
	OnCleanup(func(t TB, dsn string) {
		if hookRuns.name != "" && strings.Contains(dsn, hookRuns.name) {
			hookRuns.dsns = append(hookRuns.dsns, dsn)
		}
	})
	code := Main(m)
	if left := children(os.Getpid()); len(left) > 0 {
		fmt.Fprintf(os.Stderr, "processes left by the tests: %v\n", left)
		code = 1
	}
	os.Exit(code)
}

func runChild(dir string) {
	ctx := context.Background()
	s, err := Start(ctx, &Options{DataDir: dir})
	if err == nil {
		err = s.Exec(ctx, "postgres", "CREATE TABLE kept AS SELECT 42 AS n")
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	// Busy threads come and go: the server must not notice.
	for range 20 {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // the thread ends with the goroutine
		}()
		<-done
	}
	time.Sleep(200 * time.Millisecond)
	if s.PID() == 0 {
		fmt.Println("the server ended together with a thread")
		os.Exit(1)
	}
	fmt.Printf("ready %d %s\n", s.PID(), s.baseDir())
	select {}
}

// children lists the descendants of a process, ended ones that nobody reaped
// included.
func children(pid int) []processInfo {
	list, _ := processes()
	for i := range list {
		list[i].zombie = false
	}
	return slices.DeleteFunc(descendants(list, pid), func(p processInfo) bool { return p.command == "ps" })
}

func start(t *testing.T, o *Options) *Server {
	t.Helper()
	return New(t, o)
}

func query[T any](t *testing.T, dsn, sql string, args ...any) T {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var v T
	if err := conn.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func mustExec(t *testing.T, s *Server, db, sql string) {
	t.Helper()
	if err := s.Exec(t.Context(), db, sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// openDir returns a folder whose parents every user can enter, unlike those of
// t.TempDir under some umasks.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "pgtest-")
	noError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	noError(t, os.Chmod(dir, 0o755))
	return dir
}

func assertGone(t *testing.T, pids []processInfo) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		list, err := processes()
		noError(t, err)
		var left []processInfo
		for _, want := range pids {
			if p, ok := findProcess(list, want.pid); ok && p.start == want.start {
				left = append(left, p)
			}
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still there: %+v", left)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func treeOf(t *testing.T, pid int) []processInfo {
	t.Helper()
	list, err := processes()
	noError(t, err)
	p, ok := findProcess(list, pid)
	if !ok {
		t.Fatalf("no process %d", pid)
	}
	return append(descendants(list, pid), p)
}

func TestFind(t *testing.T) {
	b, err := Find()
	noError(t, err)
	if b.Major < MinMajor || !strings.HasPrefix(b.Version, fmt.Sprint(b.Major)) {
		t.Errorf("got %+v", b)
	}
	t.Setenv(BinEnv, b.Dir)
	if again, err := Find(); err != nil || again != b {
		t.Errorf("with %s: %+v, %v", BinEnv, again, err)
	}
	empty := t.TempDir()
	t.Setenv(BinEnv, empty)
	if _, err := Find(); !errors.Is(err, ErrNoServer) || !strings.Contains(err.Error(), empty) || !strings.Contains(err.Error(), BinEnv) {
		t.Errorf("empty folder: %v", err)
	}
	if _, err := Start(t.Context(), &Options{BinDir: empty}); !errors.Is(err, ErrNoServer) {
		t.Errorf("empty BinDir: %v", err)
	}
}

func TestFindPrefersTheNewestAndRefusesOld(t *testing.T) {
	fake := func(version string, names ...string) string {
		dir := t.TempDir()
		for _, name := range names {
			script := fmt.Sprintf("#!/bin/sh\necho 'postgres (PostgreSQL) %s (fake)'\n", version)
			noError(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
		}
		return dir
	}
	old := fake("13.2", "postgres", "initdb")
	half := fake("99.2", "postgres")
	newest := fake("98beta1", "postgres", "initdb")
	newer := fake("97.3", "postgres", "initdb")
	t.Setenv(BinEnv, "")
	t.Setenv("PATH", strings.Join([]string{old, half, newer, newest, os.Getenv("PATH")}, string(os.PathListSeparator)))
	b, err := Find()
	if err != nil || b != (Binaries{Dir: newest, Major: 98, Version: "98beta1"}) {
		t.Errorf("got %+v, %v", b, err)
	}
	t.Setenv(BinEnv, old)
	if _, err := Find(); err == nil || !strings.Contains(err.Error(), "13.2 is older than 14") {
		t.Errorf("old version: %v", err)
	}
}

func TestStartStopLeavesNothing(t *testing.T) {
	s, err := Start(t.Context(), nil)
	noError(t, err)
	tree := treeOf(t, s.PID())
	base := s.baseDir()
	if len(tree) < 3 {
		t.Errorf("few processes: %+v", tree)
	}
	if st, err := os.Stat(base); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("folder %s: %v, %v", base, st, err)
	}
	for name, want := range map[string]string{
		"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on", "listen_addresses": "",
		"shared_buffers": "128MB", "max_connections": "200", "max_prepared_transactions": "20",
		"autovacuum": "on", "TimeZone": "UTC", "server_encoding": "UTF8",
	} {
		if got := query[string](t, s.DSN("postgres"), "SELECT current_setting($1)", name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	if got := query[string](t, s.DSN("postgres"), "SELECT current_user::text"); got != "postgres" {
		t.Errorf("user %s", got)
	}
	// Stop must not wait for clients.
	conn, err := pgx.Connect(t.Context(), s.DSN("postgres"))
	noError(t, err)
	defer conn.Close(context.Background())
	noError(t, s.Stop(t.Context()))
	noError(t, s.Stop(t.Context()))
	assertGone(t, tree)
	if _, err := os.Lstat(base); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("folder %s is left: %v", base, err)
	}
	if s.PID() != 0 {
		t.Error("a stopped server has a process id")
	}
	if !strings.Contains(s.LogTail(50), "shut down") {
		t.Errorf("log after Stop: %q", s.LogTail(50))
	}
	if lines := strings.Split(s.LogTail(2), "\n"); len(lines) != 2 {
		t.Errorf("2 lines of log: %q", lines)
	}
	if err := s.StartAgain(t.Context()); err == nil || !strings.Contains(err.Error(), "removed by Stop") {
		t.Errorf("start after the end: %v", err)
	}
}

func TestSettingsAndCommand(t *testing.T) {
	s := start(t, &Options{Fast: true, TCP: true, Settings: map[string]string{
		"Shared_Buffers": "16MB", "weir.odd": `it's a \ "test"`, "wal_level": "logical",
	}})
	for name, want := range map[string]string{
		"fsync": "off", "full_page_writes": "off", "synchronous_commit": "on",
		"shared_buffers": "16MB", "weir.odd": `it's a \ "test"`, "wal_level": "logical", "listen_addresses": "127.0.0.1",
	} {
		if got := query[string](t, s.TCPDSN("postgres"), "SELECT current_setting($1)", name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	// A setting must stay open to ALTER SYSTEM.
	mustExec(t, s, "postgres", "ALTER SYSTEM SET max_connections = 77")
	addr := s.TCPAddr()
	noError(t, s.Restart(t.Context()))
	if got := query[string](t, s.DSN("postgres"), "SHOW max_connections"); got != "77" {
		t.Errorf("max_connections = %s", got)
	}
	if s.TCPAddr() != addr {
		t.Errorf("address changed from %s to %s", addr, s.TCPAddr())
	}

	t.Setenv("PGHOST", "no.such.host.invalid")
	const odd = `odd /?&%+"name é`
	noError(t, s.CreateDatabase(t.Context(), odd))
	for _, args := range [][]string{{"-d", s.DSN(odd)}, {"-d", s.TCPDSN(odd)}, {"-d", odd}} {
		out, err := s.Command("psql", append(args, "-XAtc", "SELECT current_database()")...).CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != odd {
			t.Errorf("psql %v: %v, %s", args, err, out)
		}
	}
	if got := query[string](t, s.DSN(odd), "SELECT current_database()::text"); got != odd {
		t.Errorf("database %s", got)
	}
	noError(t, s.DropDatabase(t.Context(), odd))

	// A base backup reads every file of the data folder, and runs as a server.
	dir := openDir(t)
	noError(t, s.user.chown(dir))
	noError(t, os.Chmod(dir, 0o755))
	backup := filepath.Join(dir, "backup")
	if out, err := s.Command("pg_basebackup", "-D", backup, "--checkpoint=fast").CombinedOutput(); err != nil {
		t.Fatalf("pg_basebackup: %v\n%s", err, out)
	}
	restored := start(t, &Options{DataDir: backup})
	if got := query[string](t, restored.DSN("postgres"), "SHOW fsync"); got != "on" {
		t.Errorf("fsync = %s: settings of an earlier start stayed", got)
	}
}

func TestBadOptions(t *testing.T) {
	for want, o := range map[string]*Options{
		"bad port":                     {Port: 5},
		"decided by the other options": {Settings: map[string]string{"port": "1"}},
		"bad setting name":             {Settings: map[string]string{"a b": "1"}},
		// The message of the server itself, from its log.
		"invalid value for parameter": {Fast: true, Settings: map[string]string{"max_connections": "many"}},
	} {
		if s, err := Start(t.Context(), o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v, %v", want, s, err)
		}
	}
	if left := children(os.Getpid()); len(left) > 1 && shared.server == nil {
		t.Errorf("processes left: %+v", left)
	}
}

func TestStartHonoursContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := Start(ctx, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestRestartKeepsData(t *testing.T) {
	s := start(t, nil)
	dsn := s.DSN("postgres")
	mustExec(t, s, "postgres", "CREATE TABLE kept AS SELECT 42 AS n; CREATE TABLE second AS SELECT 1 AS n")
	before := s.PID()
	noError(t, s.Restart(t.Context()))
	if s.PID() == before || s.PID() == 0 {
		t.Errorf("process %d, then %d", before, s.PID())
	}
	if got := query[int](t, dsn, "SELECT n FROM kept"); got != 42 {
		t.Errorf("n = %d", got)
	}
}

func TestCrash(t *testing.T) {
	s := start(t, nil)
	dsn := s.DSN("postgres")
	mustExec(t, s, "postgres", "CREATE TABLE kept (n int)")
	conn, err := pgx.Connect(t.Context(), dsn)
	noError(t, err)
	defer conn.Close(context.Background())
	for round := range 2 {
		mustExec(t, s, "postgres", fmt.Sprintf("INSERT INTO kept VALUES (%d)", round))
		open, err := pgx.Connect(t.Context(), dsn)
		noError(t, err)
		defer open.Close(context.Background())
		_, err = open.Exec(t.Context(), "BEGIN; INSERT INTO kept VALUES (1000)")
		noError(t, err)
		tree := treeOf(t, s.PID())
		noError(t, s.Crash(t.Context()))
		list, err := processes()
		noError(t, err)
		for _, p := range tree {
			if got, ok := findProcess(list, p.pid); ok && got.start == p.start {
				t.Errorf("Crash left %+v", got)
			}
		}
		if s.PID() != 0 {
			t.Error("a crashed server has a process id")
		}
		if err := s.Crash(t.Context()); err == nil {
			t.Error("a second crash works")
		}
		if !fileExists(filepath.Join(s.DataDir(), "postmaster.pid")) {
			t.Error("Crash shut the server down")
		}
		noError(t, s.StartAgain(t.Context()))
		if err := s.StartAgain(t.Context()); err == nil {
			t.Error("a running server starts again")
		}
		if got := query[int](t, dsn, "SELECT count(*)::int FROM kept WHERE n < 1000"); got != round+1 {
			t.Errorf("%d rows, want %d", got, round+1)
		}
		if got := query[int](t, dsn, "SELECT count(*)::int FROM kept WHERE n = 1000"); got != 0 {
			t.Errorf("%d uncommitted rows", got)
		}
	}
	if !strings.Contains(s.LogTail(100), "was not properly shut down") {
		t.Errorf("no recovery in the log:\n%s", s.LogTail(100))
	}
}

func TestStopAfterCrashFreesSharedMemory(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads /proc")
	}
	s, err := Start(t.Context(), nil)
	noError(t, err)
	// Shared memory objects that the server holds: "/dev/shm/PostgreSQL.N" and
	// System V segments, whose inode is their id.
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", s.PID()))
	noError(t, err)
	var files, segments []string
	for line := range strings.Lines(string(maps)) {
		f := strings.Fields(line)
		if len(f) < 6 {
			continue
		}
		switch {
		case strings.HasPrefix(f[5], "/dev/shm/PostgreSQL."):
			files = append(files, f[5])
		case strings.HasPrefix(f[5], "/SYSV"):
			segments = append(segments, f[4])
		}
	}
	if len(segments) == 0 {
		t.Fatalf("no shared memory in:\n%s", maps)
	}
	base := s.baseDir()
	noError(t, s.Crash(t.Context()))
	noError(t, s.Stop(t.Context()))
	if fileExists(base) {
		t.Errorf("folder %s is left", base)
	}
	for _, f := range files {
		if fileExists(f) {
			t.Errorf("%s is left", f)
		}
	}
	table, err := os.ReadFile("/proc/sysvipc/shm")
	noError(t, err)
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 1 && slices.Contains(segments, f[1]) {
			t.Errorf("shared memory is left: %s", line)
		}
	}
}

func TestServerThatEndsByItself(t *testing.T) {
	s := start(t, nil)
	noError(t, syscall.Kill(s.PID(), syscall.SIGKILL))
	for s.PID() != 0 {
		time.Sleep(time.Millisecond)
	}
	// Its backends may still be ending.
	noError(t, s.StartAgain(t.Context()))
	mustExec(t, s, "postgres", "SELECT 1")
}

func TestKeptDataDir(t *testing.T) {
	for name, prepare := range map[string]func(dir string) error{
		"missing": func(string) error { return nil },
		"empty":   func(dir string) error { return os.MkdirAll(dir, 0o755) },
	} {
		t.Run(name, func(t *testing.T) {
			parent := openDir(t)
			dir := filepath.Join(parent, "deep", "data")
			noError(t, prepare(dir))
			first, err := Start(t.Context(), &Options{DataDir: dir, Fast: true})
			noError(t, err)
			mustExec(t, first, "postgres", "CREATE TABLE kept AS SELECT 42 AS n")

			began := time.Now()
			if _, err := Start(t.Context(), &Options{DataDir: dir}); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), dir) {
				t.Errorf("folder in use: %v", err)
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("the refusal took %v", took)
			}
			mustExec(t, first, "postgres", "SELECT 1") // undisturbed
			base := first.baseDir()
			noError(t, first.Stop(t.Context()))
			if fileExists(base) {
				t.Errorf("socket folder %s is left", base)
			}
			noError(t, first.StartAgain(t.Context()))
			noError(t, first.Stop(t.Context()))

			second := start(t, &Options{DataDir: dir})
			if got := query[int](t, second.DSN("postgres"), "SELECT n FROM kept"); got != 42 {
				t.Errorf("n = %d", got)
			}
			if got := query[string](t, second.DSN("postgres"), "SHOW fsync"); got != "on" {
				t.Errorf("fsync = %s", got)
			}
			noError(t, second.Stop(t.Context()))
			entries, err := os.ReadDir(filepath.Dir(dir))
			noError(t, err)
			if len(entries) != 1 {
				t.Errorf("more than the data folder: %v", entries)
			}

			noError(t, os.WriteFile(filepath.Join(dir, "PG_VERSION"), []byte("9\n"), 0o600))
			if _, err := Start(t.Context(), &Options{DataDir: dir}); err == nil || !strings.Contains(err.Error(), "belongs to PostgreSQL 9,") {
				t.Errorf("other version: %v", err)
			}
		})
	}
}

func TestRefusedDataDirs(t *testing.T) {
	parent := openDir(t)
	photos := filepath.Join(parent, "photos")
	noError(t, os.Mkdir(photos, 0o755))
	noError(t, os.WriteFile(filepath.Join(photos, "cat.jpg"), nil, 0o644))
	if _, err := Start(t.Context(), &Options{DataDir: photos}); err == nil || !strings.Contains(err.Error(), "not a PostgreSQL data folder") {
		t.Errorf("other folder: %v", err)
	}
	if _, err := Start(t.Context(), &Options{DataDir: filepath.Join(photos, "cat.jpg")}); err == nil {
		t.Error("a file works")
	}
	if os.Geteuid() != 0 {
		return
	}
	closed := filepath.Join(parent, "closed")
	noError(t, os.Mkdir(closed, 0o700))
	if _, err := Start(t.Context(), &Options{DataDir: filepath.Join(closed, "data")}); err == nil || !strings.Contains(err.Error(), "cannot enter") {
		t.Errorf("closed folder: %v", err)
	}
}

func TestLongAndClosedTempDir(t *testing.T) {
	long := filepath.Join(openDir(t), strings.Repeat("x", 100))
	noError(t, os.Mkdir(long, 0o700))
	t.Setenv("TMPDIR", long)
	s := start(t, &Options{Fast: true})
	mustExec(t, s, "postgres", "SELECT 1")
	noError(t, s.Stop(t.Context()))
	entries, err := os.ReadDir(long)
	if err != nil || len(entries) > 0 {
		t.Errorf("left in TMPDIR: %v, %v", entries, err)
	}
}

// fakeTB records what a helper does to a test.
type fakeTB struct {
	name     string
	failed   bool
	log      bytes.Buffer
	cleanups []func()
}

func (f *fakeTB) Helper()                   {}
func (f *fakeTB) Name() string              { return f.name }
func (f *fakeTB) Failed() bool              { return f.failed }
func (f *fakeTB) Cleanup(c func())          { f.cleanups = append(f.cleanups, c) }
func (f *fakeTB) Logf(s string, a ...any)   { fmt.Fprintf(&f.log, s+"\n", a...) }
func (f *fakeTB) Fatalf(s string, a ...any) { f.Logf(s, a...); f.failed = true; runtime.Goexit() }

// run runs a test body and its cleanups as the testing package would.
func (f *fakeTB) run(body func()) {
	guarded := func(g func()) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			g()
		}()
		<-done
	}
	guarded(body)
	for _, c := range slices.Backward(f.cleanups) {
		guarded(c)
	}
}

func databases(t *testing.T, s *Server) int {
	return query[int](t, s.DSN("postgres"), "SELECT count(*)::int FROM pg_database")
}

func TestDatabase(t *testing.T) {
	s := Shared(t)
	if Shared(t) != s {
		t.Fatal("two shared servers")
	}
	if got := query[string](t, s.DSN("postgres"), "SHOW fsync"); got != "off" {
		t.Errorf("fsync = %s", got)
	}
	before := databases(t, s)
	hookRuns.name, hookRuns.dsns = "testfake_", nil
	defer func() { hookRuns.name, hookRuns.f = "", nil }()

	tb := &fakeTB{name: "TestFake/" + strings.Repeat("É long ", 30)}
	var a, b string
	tb.run(func() {
		a, b = s.Database(tb), s.Database(tb)
		for _, dsn := range []string{a, b} { // each is empty and separate
			conn, err := pgx.Connect(t.Context(), dsn)
			if err != nil {
				tb.Fatalf("%v", err)
			}
			defer conn.Close(context.Background())
			if _, err := conn.Exec(t.Context(), "CREATE TABLE same (n int)"); err != nil {
				tb.Fatalf("%v", err)
			}
		}
		// Things that prevent a drop.
		held, err := pgx.Connect(t.Context(), a)
		if err != nil {
			tb.Fatalf("%v", err)
		}
		t.Cleanup(func() { held.Close(context.Background()) })
		if _, err := held.Exec(t.Context(), "BEGIN; INSERT INTO same VALUES (1)"); err != nil {
			tb.Fatalf("%v", err)
		}
		if _, err := held.Exec(t.Context(), "PREPARE TRANSACTION 'it''s'; BEGIN"); err != nil {
			tb.Fatalf("%v", err)
		}
	})
	if tb.failed || a == b {
		t.Errorf("test failed: %s", tb.log.String())
	}
	if !slices.Equal(hookRuns.dsns, []string{b, a}) {
		t.Errorf("hooks ran for %q, want %q", hookRuns.dsns, []string{b, a})
	}
	if got := databases(t, s); got != before {
		t.Errorf("%d databases, want %d", got, before)
	}

	// A hook that fails the test hides neither the next hook nor the drop.
	hookRuns.dsns = nil
	hookRuns.f = func(t TB, dsn string) { t.Fatalf("broken invariant in %s", dsn) }
	tb = &fakeTB{name: "TestFake_"}
	tb.run(func() { a = s.Database(tb) })
	if !tb.failed || !strings.Contains(tb.log.String(), "broken invariant in "+a) {
		t.Errorf("the hook did not fail the test: %s", tb.log.String())
	}
	if !slices.Equal(hookRuns.dsns, []string{a}) {
		t.Errorf("second hook ran for %q", hookRuns.dsns)
	}
	if got := databases(t, s); got != before {
		t.Errorf("%d databases, want %d", got, before)
	}
}

func TestDropDatabaseWithReplicationSlot(t *testing.T) {
	s := start(t, &Options{Fast: true, Settings: map[string]string{"wal_level": "logical"}})
	noError(t, s.CreateDatabase(t.Context(), "slotted"))
	mustExec(t, s, "slotted", "SELECT pg_create_logical_replication_slot('it', 'test_decoding')")
	noError(t, s.DropDatabase(t.Context(), "slotted"))
	if err := s.DropDatabase(t.Context(), "slotted"); err == nil {
		t.Error("a missing database is dropped")
	}
}

func TestHelpersOnFailure(t *testing.T) {
	// A failed test shows the log; a crashed server comes back for the hooks.
	hookRuns.name, hookRuns.dsns = "crashing_test", nil
	defer func() { hookRuns.name = "" }()
	tb := &fakeTB{name: "crashing test"}
	var s *Server
	tb.run(func() {
		s = New(tb, &Options{Fast: true})
		s.Database(tb)
		if err := s.Crash(context.Background()); err != nil {
			t.Error(err)
		}
		tb.Fatalf("on purpose")
	})
	if len(hookRuns.dsns) != 1 {
		t.Errorf("hooks ran for %q", hookRuns.dsns)
	}
	if log := tb.log.String(); !strings.Contains(log, "redo starts") && !strings.Contains(log, "was not properly shut down") {
		t.Errorf("no server log in:\n%s", log)
	}
	if fileExists(s.DataDir()) || s.PID() != 0 {
		t.Error("the server is left")
	}

	t.Setenv(BinEnv, t.TempDir())
	tb = &fakeTB{name: "no server"}
	tb.run(func() { New(tb, nil) })
	if !tb.failed || !strings.Contains(tb.log.String(), BinEnv) {
		t.Errorf("missing binaries: %v, %s", tb.failed, tb.log.String())
	}
}

func TestServerEndsWithItsParent(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux ties a process to its parent")
	}
	exe, err := os.Executable()
	noError(t, err)
	dir := filepath.Join(openDir(t), "data")
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	noError(t, err)
	noError(t, cmd.Start())
	defer cmd.Process.Kill()
	line, err := bufio.NewReader(out).ReadString('\n')
	var pid int
	var base string
	if n, _ := fmt.Sscanf(line, "ready %d %s", &pid, &base); err != nil || n != 2 {
		t.Fatalf("the child said %q, %v", line, err)
	}
	defer os.RemoveAll(base)
	tree := treeOf(t, pid)
	noError(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed

	// At once: the server may still be ending, and the new one waits for it.
	s := start(t, &Options{DataDir: dir})
	assertGone(t, tree)
	if got := query[int](t, s.DSN("postgres"), "SELECT n FROM kept"); got != 42 {
		t.Errorf("n = %d", got)
	}

	// Its abandoned folder is swept by a later process; a live one is not.
	sweep()
	if fileExists(base) {
		t.Errorf("%s was not swept", base)
	}
	mustExec(t, s, "postgres", "SELECT 1")
}
