package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Options says how to run a server. The zero value runs a throw-away server
// with real durability that is reachable through its Unix socket only.
type Options struct {
	// BinDir is the folder of the server binaries; "" means what [Find] finds.
	BinDir string

	// DataDir is the data folder. "" means a temporary one, which Stop removes.
	// A given folder is created when missing, initialised when empty, reused
	// otherwise, and never removed.
	DataDir string

	// Settings are server settings (postgresql.conf names and values, without
	// quotes) that replace or extend the defaults listed at [Start]. Those that
	// the other options decide (port, listen_addresses, ...) are refused.
	Settings map[string]string

	// TCP makes the server listen on 127.0.0.1 as well, where every local user
	// can then connect as the superuser without a password.
	TCP bool

	// Port is the TCP port, 1 to 65535; 0 means a free one. It is kept over
	// restarts. Only meaningful with TCP.
	Port int

	// Fast turns off fsync and full_page_writes. Committed data then survives
	// a crash of the server, but not one of the machine.
	Fast bool
}

const (
	superuser = "postgres"

	// startTimeout bounds a start when the caller's context has no deadline.
	// Recovery after a crash may have much log to replay.
	startTimeout = 2 * time.Minute

	// stopTimeout bounds a fast shutdown (which writes a checkpoint) when the
	// caller's context has no deadline; killTimeout bounds each harder step.
	stopTimeout = time.Minute
	killTimeout = 15 * time.Second

	// socketPort numbers the socket of a server that does not listen on TCP.
	socketPort = 5432

	// maxSocketDir keeps the socket's path within the 103 bytes that the
	// strictest systems allow (Linux allows 107).
	maxSocketDir = 103 - len("/.s.PGSQL.65535")

	logName    = "server.log"
	maxLogSize = 64 << 20 // bytes; a larger log is set aside at the next start

	confName    = "weir.conf"
	includeLine = "include_if_exists '" + confName + "'"

	tempPrefix = "weir-pg-"
	ownerLock  = "owner.lock"
)

// ErrInUse is matched (errors.Is) by the error of [Start] when another running
// server uses the data folder.
var ErrInUse = errors.New("the data folder is in use by a running server")

// Server is one PostgreSQL server. Its methods may be called from several
// goroutines at the same time.
type Server struct {
	bin  Binaries
	opts Options
	user *account // whom the server runs as; nil: the current user
	data string   // data folder
	temp bool     // the data folder is temporary: inside base, removed by Stop

	// op is held for the length of Start, Stop, Restart, Crash and StartAgain.
	op sync.Mutex

	// mu protects the fields below; it is never held while waiting.
	mu      sync.Mutex
	base    string   // private temporary folder: socket, and data when temporary
	lock    *os.File // held to tell live temporary folders from abandoned ones
	port    int
	proc    *process // current or last server process
	lastLog []string // tail of a log that was removed
	stopped bool     // by Stop
	killed  bool     // did not end by a shutdown: shared memory may be left over
}

// process is one run of the postmaster.
type process struct {
	pid  int
	os   *os.Process   // for signals: knows when the id is no longer valid
	done chan struct{} // closed when the process has ended and was reaped
	err  error         // how it ended; valid once done is closed
}

func (p *process) alive() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Start runs a PostgreSQL server and waits until it accepts connections, at most
// until ctx ends, or for two minutes when ctx has no deadline. A nil o means the
// defaults. ctx bounds the start only, not the server's life.
//
// The server has a superuser "postgres", encoding UTF8, locale C.UTF-8 (C where
// that does not exist) and these settings: shared_buffers=128MB,
// max_connections=200, max_prepared_transactions=20, autovacuum=on,
// timezone=UTC, and PostgreSQL's own defaults otherwise, so commits are durable
// unless o.Fast is set. Authentication is "trust": access is limited by the mode
// of the socket's folder. When this process is root, the server runs as the user
// "postgres", or else "nobody", or as the owner of an existing data folder.
//
// Errors: no usable binaries ([ErrNoServer]); a data folder that is in use
// ([ErrInUse]), is not a data folder, belongs to another major version or cannot
// be reached by the server's user; a bad setting; a server that ends or does not
// answer in time, with the last lines of its log. After an error nothing runs and
// no temporary folder is left.
func Start(ctx context.Context, o *Options) (*Server, error) {
	s := &Server{}
	if o != nil {
		s.opts = *o
		s.opts.Settings = maps.Clone(o.Settings)
	}
	if err := s.start(ctx); err != nil {
		return nil, fmt.Errorf("pgtest: starting PostgreSQL: %w", err)
	}
	return s, nil
}

func (s *Server) start(ctx context.Context) (err error) {
	s.op.Lock()
	defer s.op.Unlock()
	ctx, cancel := withDefaultTimeout(ctx, startTimeout)
	defer cancel()

	if s.opts.Port < 0 || s.opts.Port > 65535 || s.opts.Port != 0 && !s.opts.TCP {
		return fmt.Errorf("bad port %d: want 0 to 65535, and only together with TCP", s.opts.Port)
	}
	if _, err := s.conf(); err != nil {
		return err
	}
	if s.opts.BinDir != "" {
		if s.bin, err = inspect(s.opts.BinDir); err != nil {
			return fmt.Errorf("%w: %s: %w", ErrNoServer, s.opts.BinDir, err)
		}
	} else if s.bin, err = Find(); err != nil {
		return err
	}
	if s.user, err = serverAccount(); err != nil {
		return err
	}
	if err := s.user.reachable(s.bin.Dir); err != nil {
		return err
	}
	sweepOnce.Do(sweep)

	fresh := true
	if s.opts.DataDir != "" {
		if s.data, err = filepath.Abs(s.opts.DataDir); err != nil {
			return err
		}
		if fresh, err = s.examineDataDir(ctx); err != nil {
			return err
		}
	}
	if err := s.makeBase(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			s.removeBase()
		}
	}()
	if s.opts.DataDir == "" {
		s.temp = true
		s.data = filepath.Join(s.baseDir(), "data")
	}
	if fresh {
		if err := s.createDataDir(ctx); err != nil {
			return err
		}
	}
	return s.launch(ctx)
}

// examineDataDir checks a given data folder and reports whether it still has to
// be initialised.
func (s *Server) examineDataDir(ctx context.Context) (fresh bool, err error) {
	entries, err := os.ReadDir(s.data)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("data folder: %w", err)
	case len(entries) == 0:
		return true, nil
	}
	version, err := os.ReadFile(filepath.Join(s.data, "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("%s is not a PostgreSQL data folder, and not empty (it holds %s, ...)", s.data, entries[0].Name())
	}
	if err != nil {
		return false, fmt.Errorf("data folder: %w", err)
	}
	if v := strings.TrimSpace(string(version)); v != strconv.Itoa(s.bin.Major) {
		return false, fmt.Errorf("data folder %s belongs to PostgreSQL %s, but the binaries in %s are version %s; remedy: point %s at PostgreSQL %s, or use another data folder",
			s.data, v, s.bin.Dir, s.bin.Version, BinEnv, v)
	}
	if s.user, err = ownerAccount(s.data); err != nil {
		return false, err
	}
	if err := s.user.reachable(s.data); err != nil {
		return false, err
	}
	return false, s.waitUnused(ctx)
}

// waitUnused returns an error when a running server uses the data folder. A
// server whose parent was just killed is given the time to end.
func (s *Server) waitUnused(ctx context.Context) error {
	ready := time.Now().Add(500 * time.Millisecond)
	for {
		data, err := os.ReadFile(filepath.Join(s.data, "postmaster.pid"))
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("data folder: %w", err)
		}
		lines := strings.Split(string(data), "\n")
		pid, err := strconv.Atoi(strings.TrimSpace(lines[0]))
		if err != nil || !isPostgres(pid) {
			return nil // stale, or being removed; the server itself looks closer
		}
		// Line 8 is the state of the server.
		ending := len(lines) > 7 && strings.TrimSpace(lines[7]) == "stopping"
		if !ending && time.Now().After(ready) || sleep(ctx, 20*time.Millisecond) != nil {
			return fmt.Errorf("%w: %s, process %d", ErrInUse, s.data, pid)
		}
	}
}

// createDataDir runs initdb.
func (s *Server) createDataDir(ctx context.Context) error {
	parent := filepath.Dir(s.data)
	if s.temp {
		if err := s.makeDir(s.data); err != nil {
			return err
		}
		return s.initdb(ctx, s.data)
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return fmt.Errorf("data folder: %w", err)
	}
	if err := s.user.reachable(parent); err != nil {
		return err
	}
	// A kept folder appears complete or not at all: an initdb that was cut
	// short would leave one that can be neither used nor initialised.
	if made, err := os.MkdirTemp(parent, "."+filepath.Base(s.data)+".initdb-"); err == nil {
		defer os.RemoveAll(made)
		if err := s.user.chown(made); err != nil {
			return err
		}
		if err := s.initdb(ctx, made); err != nil {
			return err
		}
		// Rename wants the name to be free; an empty folder may be there.
		if st, err := os.Lstat(s.data); err == nil && st.IsDir() {
			os.Remove(s.data)
		}
		if os.Rename(made, s.data) == nil {
			return syncDir(parent)
		}
	}
	// The parent is not writable, or the folder is a mount point or a link.
	if err := s.makeDir(s.data); err != nil {
		return err
	}
	return s.initdb(ctx, s.data)
}

// makeDir makes a folder private to the server's user.
func (s *Server) makeDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return err
	}
	return s.user.chown(dir)
}

func (s *Server) initdb(ctx context.Context, dir string) error {
	var out string
	var err error
	for _, locale := range []string{"C.UTF-8", "C"} {
		args := []string{
			"-D", dir, "-U", superuser, "--encoding=UTF8", "--locale=" + locale, "--lc-messages=C",
			"--auth-local=trust", "--auth-host=trust", "--no-instructions",
		}
		if s.temp {
			args = append(args, "--no-sync")
		}
		out, err = s.run(ctx, "initdb", args...)
		if err == nil {
			return nil
		}
		if !strings.Contains(out, "locale") {
			break
		}
	}
	return fmt.Errorf("initdb: %w\n%s", err, out)
}

// run runs a helper of the server's binaries as the server's user and returns
// what it printed.
func (s *Server) run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin.Dir, name), args...)
	cmd.Env = s.environ()
	cmd.Dir = s.baseDir()
	cmd.SysProcAttr = helperAttr(s.user)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	// initdb removes what it made when it is asked to end.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 5 * time.Second

	// The helper is told to end when the thread that started it dies.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return strings.TrimSpace(out.String()), err
}

// environ is the environment for the server's binaries: without the variables
// that would point them at other servers, and with a home folder that they may
// read.
func (s *Server) environ() []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || s.user != nil && strings.HasPrefix(kv, "HOME=")
	})
	if s.user != nil {
		env = append(env, "HOME="+s.baseDir())
	}
	return env
}

func (s *Server) baseDir() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.base
}

var settingName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.$]*$`)

// conf returns the contents of the settings file.
func (s *Server) conf() (string, error) {
	settings := map[string]string{
		"shared_buffers":            "128MB",
		"max_connections":           "200",
		"max_prepared_transactions": "20",
		"autovacuum":                "on",
		"timezone":                  "UTC",
		"log_timezone":              "UTC",
		"log_destination":           "stderr",
		"logging_collector":         "off",
		"log_line_prefix":           "%m [%p] %q%d ",
	}
	if s.opts.Fast {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
	}
	for name, value := range s.opts.Settings {
		if !settingName.MatchString(name) {
			return "", fmt.Errorf("bad setting name %q", name)
		}
		name = strings.ToLower(name)
		switch name {
		case "port", "listen_addresses", "unix_socket_directories", "data_directory", "config_file", "include", "include_dir", "include_if_exists":
			return "", fmt.Errorf("setting %s is decided by the other options", name)
		}
		if strings.ContainsRune(value, 0) {
			return "", fmt.Errorf("setting %s has a zero byte", name)
		}
		settings[name] = value
	}
	var b strings.Builder
	b.WriteString("# Rewritten at every start.\n")
	quote := strings.NewReplacer(`\`, `\\`, `'`, `''`, "\n", `\n`, "\r", `\r`)
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&b, "%s = '%s'\n", name, quote.Replace(settings[name]))
	}
	return b.String(), nil
}

// writeConf writes the settings. They go to a file rather than to the command
// line so that ALTER SYSTEM can still override them.
func (s *Server) writeConf() error {
	conf, err := s.conf()
	if err != nil {
		return err
	}
	if err := s.writeFile(confName, os.O_TRUNC, conf); err != nil {
		return err
	}
	main, err := os.ReadFile(filepath.Join(s.data, "postgresql.conf"))
	if err != nil {
		return err
	}
	if slices.Contains(strings.Split(string(main), "\n"), includeLine) {
		return nil
	}
	return s.writeFile("postgresql.conf", os.O_APPEND, "\n"+includeLine+"\n")
}

// writeFile writes a file of the data folder.
func (s *Server) writeFile(name string, flag int, text string) error {
	f, err := s.openFile(name, flag)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// openFile opens a file of the data folder for writing; it belongs to the
// server's user, so that a base backup can read it.
func (s *Server) openFile(name string, flag int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(s.data, name), os.O_WRONLY|os.O_CREATE|openNoFollow|flag, 0o600)
	if err != nil {
		return nil, err
	}
	if err := s.user.chownFile(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// openLog opens the server's log, after setting aside one that grew large.
func (s *Server) openLog() (*os.File, int64, error) {
	if st, err := os.Lstat(s.LogPath()); err == nil && st.Size() > maxLogSize {
		if err := os.Rename(s.LogPath(), s.LogPath()+".old"); err != nil {
			return nil, 0, err
		}
	}
	f, err := s.openFile(logName, os.O_APPEND)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, st.Size(), nil
}

// launch starts the server and waits until it accepts connections.
func (s *Server) launch(ctx context.Context) error {
	if err := s.writeConf(); err != nil {
		return fmt.Errorf("writing the settings: %w", err)
	}
	for try := 1; ; try++ {
		err := s.choosePort()
		if err == nil {
			err = s.launchOnce(ctx)
		}
		if err == nil || ctx.Err() != nil {
			return err
		}
		// Only the text of the log tells these passing failures from others.
		text := err.Error()
		switch {
		case strings.Contains(text, "could not create any TCP/IP sockets") && s.opts.TCP && s.opts.Port == 0 && !s.everStarted() && try < 10:
			s.setPort(0) // somebody took the free port in the meantime
		case strings.Contains(text, "is still in use") && strings.Contains(text, "shared memory") && try < 100:
			// Backends of a server that was killed are still ending.
			if sleep(ctx, 50*time.Millisecond) != nil {
				return err
			}
		case strings.Contains(text, `lock file "postmaster.pid" already exists`):
			return fmt.Errorf("%w: %s\n%w", ErrInUse, s.data, err)
		default:
			return err
		}
	}
}

func (s *Server) everStarted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil
}

func (s *Server) setPort(port int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.port = port
}

func (s *Server) choosePort() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.port != 0:
	case !s.opts.TCP:
		s.port = socketPort
	case s.opts.Port != 0:
		s.port = s.opts.Port
	default:
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return fmt.Errorf("finding a free port: %w", err)
		}
		s.port = l.Addr().(*net.TCPAddr).Port
		return l.Close()
	}
	return nil
}

func (s *Server) launchOnce(ctx context.Context) error {
	log, from, err := s.openLog()
	if err != nil {
		return fmt.Errorf("server log: %w", err)
	}
	defer log.Close()
	listen := ""
	if s.opts.TCP {
		listen = "127.0.0.1"
	}
	s.mu.Lock()
	base, port := s.base, s.port
	s.mu.Unlock()
	cmd := exec.Command(filepath.Join(s.bin.Dir, "postgres"),
		"-D", s.data, "-k", base, "-p", strconv.Itoa(port), "-c", "listen_addresses="+listen)
	cmd.Env = s.environ()
	cmd.Dir = base
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = serverAttr(s.user)

	p := &process{done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel signals the server when the thread that started it dies,
		// so that thread must live as long as the server: this goroutine keeps
		// it, and reaps the server at the end.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		p.pid, p.os = cmd.Process.Pid, cmd.Process
		started <- nil
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return err
	}

	err = s.waitReady(ctx, p)
	if err != nil {
		if p.alive() {
			kill, cancel := context.WithTimeout(context.Background(), killTimeout)
			defer cancel()
			err = errors.Join(err, s.end(kill, p, true))
		}
		if tail := s.tailSince(from, 40); len(tail) > 0 {
			err = fmt.Errorf("%w; last lines of its log:\n%s", err, strings.Join(tail, "\n"))
		}
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc = p
	s.stopped, s.killed = false, false
	s.lastLog = nil
	return nil
}

// waitReady polls until the server accepts connections.
func (s *Server) waitReady(ctx context.Context, p *process) error {
	var last error
	for {
		conn, err := pgx.Connect(ctx, s.DSN("postgres"))
		if err == nil {
			return conn.Close(ctx)
		}
		var answer *pgconn.PgError
		if errors.As(err, &answer) {
			switch answer.Code {
			case "57P03": // cannot connect now: starting up
			case "53300": // too many connections: clients were faster
				return nil
			default:
				return fmt.Errorf("the server refuses connections: %w", err)
			}
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-p.done:
			if p.err == nil {
				return errors.New("the server ended while starting")
			}
			return fmt.Errorf("the server ended while starting (%w)", p.err)
		case <-ctx.Done():
			return fmt.Errorf("the server did not accept connections in time (%w); last attempt: %w", context.Cause(ctx), last)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// end ends a server process: by a fast shutdown (or an immediate one), and by
// harder means when ctx ends before it is over. It returns an error when harder
// means were needed; the process is gone in any case that the system allows.
func (s *Server) end(ctx context.Context, p *process, immediate bool) error {
	sig, kind := fastShutdown, "fast"
	if immediate {
		sig, kind = immediateShutdown, "immediate"
	}
	if err := p.os.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signalling the server: %w", err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	s.killed = true
	s.mu.Unlock()
	err := fmt.Errorf("the %s shutdown did not end in time (%w) and was cut short", kind, context.Cause(ctx))
	if !immediate && p.os.Signal(immediateShutdown) == nil {
		select {
		case <-p.done:
			return err
		case <-time.After(killTimeout):
		}
	}
	kill, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	return errors.Join(err, killAndReap(kill, p))
}

func killAndReap(ctx context.Context, p *process) error {
	if err := killTree(ctx, p.pid); err != nil {
		return err
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for process %d: %w", p.pid, context.Cause(ctx))
	}
}

// Stop shuts the server down (fast: it ends open transactions and disconnects
// clients) and removes its temporary folders. It waits until ctx ends, or for a
// minute when ctx has no deadline; then it ends the server by force and reports
// that as an error. Stopping a stopped server does nothing.
func (s *Server) Stop(ctx context.Context) error {
	s.op.Lock()
	defer s.op.Unlock()
	s.mu.Lock()
	p, done := s.proc, s.stopped
	s.mu.Unlock()
	if done {
		return nil
	}
	ctx, cancel := withDefaultTimeout(ctx, stopTimeout)
	defer cancel()
	var errs []error
	if p.alive() {
		errs = append(errs, s.end(ctx, p, false))
	} else {
		s.noteDeath()
	}
	s.mu.Lock()
	killed := s.killed
	s.stopped = true
	s.mu.Unlock()
	if s.temp {
		if killed {
			s.releaseSharedMemory(ctx)
		}
		tail := s.tailSince(0, 1000)
		s.mu.Lock()
		s.lastLog = tail
		s.mu.Unlock()
	}
	if err := s.removeBase(); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("pgtest: stopping PostgreSQL: %w", err)
	}
	return nil
}

// noteDeath records that the server process ended by itself.
func (s *Server) noteDeath() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopped {
		s.killed = true
	}
}

// releaseSharedMemory frees the shared memory segments that a killed server left
// in the system. The next start on the same data folder does that; a temporary
// folder has no next start, so it gets a short one without clients. What cannot
// be freed stays until the machine restarts: not worth an error.
func (s *Server) releaseSharedMemory(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	_, _ = s.run(ctx, "postgres", "--single", "-D", s.data, "-F", "template1")
}

// Restart shuts the server down (fast) and starts it again on the same data
// folder, socket and port. ctx bounds both together, with the defaults of
// [Server.Stop] and [Start] when it has no deadline. The errors are theirs.
func (s *Server) Restart(ctx context.Context) error {
	s.op.Lock()
	defer s.op.Unlock()
	s.mu.Lock()
	p := s.proc
	s.mu.Unlock()
	if !p.alive() {
		return errors.New("pgtest: restarting PostgreSQL: the server is not running")
	}
	stop, cancel := withDefaultTimeout(ctx, stopTimeout)
	defer cancel()
	if err := s.end(stop, p, false); err != nil {
		return fmt.Errorf("pgtest: restarting PostgreSQL: %w", err)
	}
	return s.startAgain(ctx)
}

// Crash kills the server the way a crash would: SIGKILL for the postmaster and
// for every backend, and no shutdown of any kind. It returns when all of them are
// gone, and fails when that takes longer than ctx allows (15 seconds when ctx has
// no deadline) or when the server is not running. Nothing is removed: see
// [Server.StartAgain] and [Server.Stop].
func (s *Server) Crash(ctx context.Context) error {
	s.op.Lock()
	defer s.op.Unlock()
	s.mu.Lock()
	p := s.proc
	s.mu.Unlock()
	if !p.alive() {
		return errors.New("pgtest: crashing PostgreSQL: the server is not running")
	}
	ctx, cancel := withDefaultTimeout(ctx, killTimeout)
	defer cancel()
	s.mu.Lock()
	s.killed = true
	s.mu.Unlock()
	if err := killAndReap(ctx, p); err != nil {
		return fmt.Errorf("pgtest: crashing PostgreSQL: %w", err)
	}
	return nil
}

// StartAgain starts a server that was crashed, that ended by itself or that was
// stopped with a kept data folder, with the same options and port, and waits
// like [Start]. The socket's folder, and so the DSN, stays the same unless
// somebody else took its name after a Stop. It fails when the server is running,
// when its temporary data was removed by Stop, and like Start.
func (s *Server) StartAgain(ctx context.Context) error {
	s.op.Lock()
	defer s.op.Unlock()
	s.mu.Lock()
	p, stopped := s.proc, s.stopped
	s.mu.Unlock()
	switch {
	case p.alive():
		return errors.New("pgtest: starting PostgreSQL again: the server is running")
	case stopped && s.temp:
		return errors.New("pgtest: starting PostgreSQL again: its temporary data folder was removed by Stop")
	}
	return s.startAgain(ctx)
}

func (s *Server) startAgain(ctx context.Context) error {
	ctx, cancel := withDefaultTimeout(ctx, startTimeout)
	defer cancel()
	err := s.waitUnused(ctx)
	if err == nil {
		err = s.makeBase()
	}
	if err == nil {
		err = s.launch(ctx)
	}
	if err != nil {
		s.mu.Lock()
		stopped := s.stopped
		s.mu.Unlock()
		if stopped {
			s.removeBase() // as Stop left it
		}
		return fmt.Errorf("pgtest: starting PostgreSQL again: %w", err)
	}
	return nil
}

// stoppedOnPurpose reports whether Stop ended the server.
func (s *Server) stoppedOnPurpose() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopped
}

// makeBase makes the private temporary folder, under its earlier name if it had
// one.
func (s *Server) makeBase() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock != nil {
		return nil // still there
	}
	if s.base == "" || os.Mkdir(s.base, 0o700) != nil {
		base, err := s.tempDir()
		if err != nil {
			return err
		}
		s.base = base
	}
	// The lock gets its final name only once it is held: a lock file that is
	// not locked tells that the folder was abandoned.
	making := filepath.Join(s.base, ownerLock+".new")
	lock, err := os.OpenFile(making, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		if !tryLock(lock) {
			err = fmt.Errorf("cannot lock %s", making)
		}
		err = errors.Join(err, os.Rename(making, filepath.Join(s.base, ownerLock)), s.user.chown(s.base))
	}
	if err != nil {
		if lock != nil {
			lock.Close()
		}
		os.RemoveAll(s.base)
		return err
	}
	s.lock = lock
	return nil
}

// tempDir makes a temporary folder whose path is short enough for a socket and
// which the server's user can reach.
func (s *Server) tempDir() (string, error) {
	var errs []error
	for _, parent := range tempParents() {
		dir, err := os.MkdirTemp(parent, tempPrefix)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if len(dir) > maxSocketDir {
			err = fmt.Errorf("%s is too long for the path of a Unix socket", dir)
		} else {
			err = s.user.reachable(parent)
		}
		if err == nil {
			return dir, nil
		}
		os.Remove(dir)
		errs = append(errs, err)
	}
	return "", fmt.Errorf("no place for a temporary folder: %w", errors.Join(errs...))
}

func tempParents() []string {
	parents := []string{os.TempDir(), "/tmp"}
	if abs, err := filepath.Abs(parents[0]); err == nil {
		parents[0] = abs
	}
	return slices.Compact(parents)
}

func (s *Server) removeBase() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock == nil {
		return nil
	}
	err := os.RemoveAll(s.base)
	s.lock.Close()
	s.lock = nil
	return err
}

var sweepOnce sync.Once

// sweep removes the temporary folders of processes that were killed before they
// could call Stop. It is courtesy: errors are ignored.
func sweep() {
	for _, parent := range tempParents() {
		locks, _ := filepath.Glob(filepath.Join(parent, tempPrefix+"*", ownerLock))
		for _, name := range locks {
			sweepOne(name)
		}
	}
}

func sweepOne(lockName string) {
	lock, err := os.OpenFile(lockName, os.O_WRONLY|openNoFollow, 0)
	if err != nil {
		return // not ours, or just removed
	}
	defer lock.Close()
	if !tryLock(lock) {
		return // its process lives
	}
	// The server may still be shutting down.
	base := filepath.Dir(lockName)
	pidFiles, _ := filepath.Glob(filepath.Join(base, ".s.PGSQL.*.lock"))
	pidFiles = append(pidFiles, filepath.Join(base, "data", "postmaster.pid"))
	for _, name := range pidFiles {
		data, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		first, _, _ := strings.Cut(string(data), "\n")
		if pid, err := strconv.Atoi(strings.TrimSpace(first)); err == nil && isPostgres(pid) {
			return
		}
	}
	os.RemoveAll(base)
}

// DSN returns the connection string of a database of this server, over the Unix
// socket, as the superuser. It is a URL that pgx and libpq (psql, pg_dump)
// accept.
func (s *Server) DSN(database string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("postgres://%s@/%s?host=%s&port=%d",
		superuser, url.PathEscape(database), strings.ReplaceAll(url.QueryEscape(s.base), "+", "%20"), s.port)
}

// TCPAddr returns the server's TCP address as "host:port", or "" when it does
// not listen on TCP.
func (s *Server) TCPAddr() string {
	if !s.opts.TCP {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port))
}

// TCPDSN is DSN over TCP, without TLS. It returns "" when the server does not
// listen on TCP.
func (s *Server) TCPDSN(database string) string {
	addr := s.TCPAddr()
	if addr == "" {
		return ""
	}
	return fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable", superuser, addr, url.PathEscape(database))
}

// Binaries returns the binaries that the server runs.
func (s *Server) Binaries() Binaries { return s.bin }

// DataDir returns the absolute path of the data folder. After Stop, a temporary
// one no longer exists.
func (s *Server) DataDir() string { return s.data }

// LogPath returns the absolute path of the server's log, a file of the data
// folder to which every start appends.
func (s *Server) LogPath() string { return filepath.Join(s.data, logName) }

// PID returns the process id of the postmaster, or 0 when the server is not
// running.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.proc.alive() {
		return 0
	}
	return s.proc.pid
}

// LogTail returns the last n lines of the server's log, without a final line
// break; fewer when the log is shorter, or longer than 256 KiB, of which it
// returns the end. It also works after Stop, for up to 1000 lines. An unreadable
// log gives "".
func (s *Server) LogTail(n int) string {
	s.mu.Lock()
	lines := slices.Clone(s.lastLog)
	s.mu.Unlock()
	if lines == nil {
		lines = s.tailSince(0, n)
	}
	return strings.Join(lines[max(0, len(lines)-max(n, 0)):], "\n")
}

// tailSince returns at most n last lines of the log, none of them from before
// the offset from (bytes).
func (s *Server) tailSince(from int64, n int) []string {
	f, err := os.OpenFile(s.LogPath(), os.O_RDONLY|openNoFollow, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil
	}
	const most = 256 << 10
	start := max(from, st.Size()-most)
	data, err := io.ReadAll(io.NewSectionReader(f, start, st.Size()-start))
	if err != nil {
		return nil
	}
	if start > from {
		_, data, _ = bytes.Cut(data, []byte("\n")) // begins within a line
	}
	text := strings.TrimRight(string(data), "\n")
	if text == "" {
		return nil
	}
	lines := strings.Split(text, "\n")
	return lines[max(0, len(lines)-max(n, 0)):]
}

// Exec runs SQL, which may hold several statements, on a new connection as the
// superuser and discards the results. The error is the server's
// (*pgconn.PgError) or that of connecting.
func (s *Server) Exec(ctx context.Context, database, sql string) error {
	return s.withConn(ctx, database, func(conn *pgx.Conn) error {
		_, err := conn.PgConn().Exec(ctx, sql).ReadAll()
		return err
	})
}

func (s *Server) withConn(ctx context.Context, database string, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, s.DSN(database))
	if err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if err := f(conn); err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	return nil
}

// CreateDatabase creates an empty database (a copy of template0). It fails when
// there is one of that name.
func (s *Server) CreateDatabase(ctx context.Context, name string) error {
	err := s.Exec(ctx, "postgres", "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()+" TEMPLATE template0")
	if err != nil {
		return fmt.Errorf("creating database %s: %w", name, err)
	}
	return nil
}

// DropDatabase drops a database whoever is using it: it disconnects clients, and
// it also rolls back prepared transactions and drops logical replication slots,
// which would otherwise prevent the drop. A missing database is an error.
func (s *Server) DropDatabase(ctx context.Context, name string) error {
	if err := s.dropDatabase(ctx, name); err != nil {
		return fmt.Errorf("dropping database %s: %w", name, err)
	}
	return nil
}

func (s *Server) dropDatabase(ctx context.Context, name string) error {
	var prepared []string
	err := s.withConn(ctx, "postgres", func(conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, "SELECT gid FROM pg_prepared_xacts WHERE database = $1", name)
		if err != nil {
			return err
		}
		if prepared, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return err
		}
		// A slot can be dropped only after its user is gone, which takes a
		// moment; meanwhile the drop fails.
		for range 100 {
			_, err = conn.Exec(ctx, `
				SELECT CASE WHEN active_pid IS NULL THEN pg_drop_replication_slot(slot_name)::text
				            ELSE pg_terminate_backend(active_pid)::text END
				FROM pg_replication_slots WHERE database = $1`, name)
			if err == nil {
				var left int
				err = conn.QueryRow(ctx, "SELECT count(*) FROM pg_replication_slots WHERE database = $1", name).Scan(&left)
				if err == nil && left == 0 {
					return nil
				}
			}
			if sleep(ctx, 20*time.Millisecond) != nil {
				break
			}
		}
		if err == nil {
			err = errors.New("its replication slots stay in use")
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, gid := range prepared {
		if err := s.Exec(ctx, name, "ROLLBACK PREPARED '"+strings.ReplaceAll(gid, "'", "''")+"'"); err != nil {
			return err
		}
	}
	return s.Exec(ctx, "postgres", "DROP DATABASE "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
}

// Command returns a command that runs another program of the same installation
// (psql, pg_dump, pg_basebackup, ...) as the user that the server runs as, with
// the environment (PGHOST, PGPORT, PGUSER, PGDATABASE) to reach this server.
// Other PG* variables of this process are not passed on. When that user is not
// the current one, the working folder is "/", HOME is a private folder, and files
// to write must be in places that the user can write to. The caller runs the
// command and may change it first.
func (s *Server) Command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin.Dir, name), args...)
	s.mu.Lock()
	base, port := s.base, s.port
	s.mu.Unlock()
	cmd.Env = append(s.environ(),
		"PGHOST="+base, "PGPORT="+strconv.Itoa(port), "PGUSER="+superuser, "PGDATABASE=postgres")
	cmd.SysProcAttr = commandAttr(s.user)
	if s.user != nil {
		cmd.Dir = "/"
	}
	return cmd
}

// withDefaultTimeout bounds a context that has no deadline of its own.
func withDefaultTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d)
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
