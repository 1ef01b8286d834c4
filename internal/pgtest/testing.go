package pgtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// TB is the part of testing.TB that the helpers need. *testing.T, *testing.B and
// *testing.F implement it.
type TB interface {
	Helper()
	Name() string
	Failed() bool
	Cleanup(func())
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// logLines is how many lines of the server's log a failed test shows.
const logLines = 40

// cleanupTimeout bounds each step that a test's cleanup takes.
const cleanupTimeout = time.Minute

// New starts a server for one test and stops it at the test's cleanup. A nil o
// means the defaults. Missing server binaries or a server that does not start
// fail the test at once (Fatalf, with the remedy); they never skip it. When the
// test has failed, the cleanup logs the last lines of the server's log.
func New(t TB, o *Options) *Server {
	t.Helper()
	s, err := Start(context.Background(), o)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("last lines of the PostgreSQL log %s:\n%s", s.LogPath(), s.LogTail(logLines))
		}
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			t.Fatalf("%v", err)
		}
	})
	return s
}

var shared struct {
	sync.Mutex
	server *Server
	err    error
}

// Shared returns a server that all tests of this process share. The first call
// starts it, with [Options].Fast: it does not survive a crash of the machine. A
// test that stops, crashes or reconfigures a server wants [New] instead. The
// test package must run its tests through [Main], which stops the server; a
// start that fails is not tried again, and fails every test that asks.
func Shared(t TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil && shared.err == nil {
		shared.server, shared.err = Start(context.Background(), &Options{Fast: true})
	}
	if shared.err != nil {
		t.Fatalf("%v", shared.err)
	}
	return shared.server
}

// Main runs the tests of a package and then stops the server that [Shared] may
// have started. It returns the exit code for os.Exit:
//
//	func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }
//
// The code is that of m.Run, or 1 when only stopping the server failed.
func Main(m interface{ Run() int }) int {
	code := m.Run()
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil {
		return code
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	if err := shared.server.Stop(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	shared.server = nil
	return code
}

var cleanupHooks struct {
	sync.Mutex
	list []func(t TB, dsn string)
}

// OnCleanup registers f to run at the cleanup of every test database made by
// [Server.Database] in this process, just before the database is dropped, with
// its DSN; f reports what it finds through t. Hooks run in the order of their
// registration, each one even when an earlier one failed the test. They are
// never removed: register them from init or TestMain.
func OnCleanup(f func(t TB, dsn string)) {
	cleanupHooks.Lock()
	defer cleanupHooks.Unlock()
	cleanupHooks.list = append(cleanupHooks.list, f)
}

// runHooks also goes on after a hook that called Fatalf, which leaves by
// runtime.Goexit.
func runHooks(hooks []func(t TB, dsn string), t TB, dsn string) {
	if len(hooks) == 0 {
		return
	}
	defer runHooks(hooks[1:], t, dsn)
	hooks[0](t, dsn)
}

// Database creates an empty database with a unique name for one test and returns
// its DSN. At the test's cleanup, after the cleanups that were registered later
// (so a connection pool opened by the test is closed by then), it runs the hooks
// of [OnCleanup] and drops the database whoever is still connected. A server that
// was crashed by the test, and not started again, is started for the hooks; one
// that was stopped is not, and the hooks do not run. Errors fail the test.
func (s *Server) Database(t TB) string {
	t.Helper()
	name := databaseName(t.Name())
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	if err := s.CreateDatabase(ctx, name); err != nil {
		t.Fatalf("%v\nlast lines of the PostgreSQL log:\n%s", err, s.LogTail(logLines))
	}
	dsn := s.DSN(name)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if s.stoppedOnPurpose() {
			t.Logf("database %s: the server was stopped before the test's end, so its cleanup hooks did not run", name)
			return
		}
		if s.PID() == 0 {
			// Another test's cleanup may be faster.
			if err := s.StartAgain(ctx); err != nil && s.PID() == 0 {
				t.Fatalf("starting the crashed server for the cleanup of database %s: %v", name, err)
			}
		}
		// Deferred, because a hook may leave by Fatalf.
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
			defer cancel()
			if err := s.DropDatabase(ctx, name); err != nil {
				t.Fatalf("%v", err)
			}
		}()
		cleanupHooks.Lock()
		hooks := slices.Clone(cleanupHooks.list)
		cleanupHooks.Unlock()
		runHooks(hooks, t, s.DSN(name))
	})
	return dsn
}

// databaseName makes a database name that shows the test it belongs to and that
// is unique even in a data folder that several runs reuse. PostgreSQL cuts names
// at 63 bytes.
func databaseName(test string) string {
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '_'
	}, test)
	if len(clean) > 40 {
		clean = clean[:40]
	}
	var b [6]byte
	rand.Read(b[:]) // never fails
	return clean + "_" + hex.EncodeToString(b[:])
}
