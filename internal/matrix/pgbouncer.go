package matrix

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir/internal/pgtest"
)

// serverConnections is how many connections a Pooler has to a database: fewer than the clients of a cell, which share them.
const serverConnections = 4

// Pooler is a program that pools connections, PgBouncer.
type Pooler struct {
	// Path is the program, Version what it says of itself, such as "1.18.0".
	Path, Version string
	// Prepared: it knows prepared statements of the protocol, and carries them from one server connection to another.
	Prepared bool
}

// FindPooler gives the PgBouncer that is installed. The error names the remedy.
func FindPooler() (Pooler, error) {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer", "/usr/local/sbin/pgbouncer"} {
		if found, err := exec.LookPath(name); err == nil {
			return poolerAt(found)
		}
	}
	return Pooler{}, errors.New("PgBouncer is missing. Install it: apt-get install pgbouncer (Debian), dnf install pgbouncer (Fedora), brew install pgbouncer (macOS)")
}

// PoolerEnv is the environment variable that names a PgBouncer of 1.21 or later, which is then not built.
const PoolerEnv = "WEIR_PGBOUNCER"

// NewerPooler gives a PgBouncer that knows prepared statements: the one that the environment variable names, the one that is
// installed, or one that pgbouncer.sh builds into the cache.
func NewerPooler(ctx context.Context) (Pooler, error) {
	given := os.Getenv(PoolerEnv)
	if given == "" {
		if p, err := FindPooler(); err == nil && p.Prepared {
			return p, nil
		}
		parent, err := cache()
		if err != nil {
			return Pooler{}, err
		}
		given = filepath.Join(parent, "pgbouncer", "pgbouncer")
		if _, err := os.Stat(given); err != nil {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, "./pgbouncer.sh", filepath.Dir(given))
			cmd.WaitDelay = time.Second
			if out, err := cmd.CombinedOutput(); err != nil {
				return Pooler{}, fmt.Errorf("pgbouncer.sh: %w\n%s", err, out)
			}
		}
	}
	p, err := poolerAt(given)
	if err == nil && !p.Prepared {
		err = fmt.Errorf("%s is %s, which has no prepared statements: it is to be 1.21 or later", given, p)
	}
	return p, err
}

var poolerVersion = regexp.MustCompile(`(?i)^pgbouncer (\d+)\.(\d+)[.\d]*`)

func poolerAt(file string) (Pooler, error) {
	out, err := exec.Command(file, "--version").Output()
	if err != nil {
		return Pooler{}, fmt.Errorf("%s --version: %w", file, err)
	}
	m := poolerVersion.FindStringSubmatch(string(out))
	if m == nil {
		return Pooler{}, fmt.Errorf("%s --version says %q", file, out)
	}
	var major, minor int
	if _, err := fmt.Sscan(m[1]+" "+m[2], &major, &minor); err != nil {
		return Pooler{}, err
	}
	return Pooler{Path: file, Version: strings.Fields(m[0])[1], Prepared: major > 1 || minor >= 21}, nil
}

// String is its name with its version.
func (p Pooler) String() string { return "PgBouncer " + p.Version }

// Pool is a Pooler that runs before a server, in transaction mode.
type Pool struct {
	base string
	port int
	end  io.Closer
	done chan struct{}
	log  lockedBuffer
}

// Start runs it before a server, until Stop or the end of this process. It is reached by a socket in the server's own folder, whose
// port tells it from others there.
func (p Pooler) Start(ctx context.Context, server *pgtest.Server, port int) (*Pool, error) {
	config, err := pgx.ParseConfig(server.DSN("postgres"))
	if err != nil {
		return nil, err
	}
	prepared := ""
	if p.Prepared {
		prepared = "max_prepared_statements = 200"
	}
	file := filepath.Join(config.Host, fmt.Sprintf("pgbouncer-%d.ini", port))
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(f, `[databases]
* = host=%[1]s port=%[2]d user=%[3]s
[pgbouncer]
unix_socket_dir = %[1]s
listen_port = %[4]d
auth_type = any
pool_mode = transaction
default_pool_size = %[5]d
max_client_conn = 1000
log_connections = 0
log_disconnections = 0
%[6]s
`, config.Host, config.Port, config.User, port, serverConnections, prepared)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}

	// It ends when its standard input does, and so with this process.
	cmd := server.Command("sh", "-c", `"$0" "$1" & pooler=$!; read -r _; kill -KILL $pooler`, p.Path, file)
	cmd.Path = "/bin/sh"
	pool := &Pool{base: config.Host, port: port, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &pool.log, &pool.log
	if pool.end, err = cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() { _ = cmd.Wait(); close(pool.done) }()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, pool.DSN("postgres", pgx.QueryExecModeExec))
		if err == nil {
			return pool, conn.Close(ctx)
		}
		select {
		case <-ctx.Done():
			pool.Stop()
			return nil, fmt.Errorf("%s does not answer: %w\n%s", p, err, pool.log.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// DSN is that of a database of the server, through the pool, in a query mode.
func (p *Pool) DSN(database string, mode pgx.QueryExecMode) string {
	return withMode(fmt.Sprintf("postgres://postgres@/%s?host=%s&port=%d", database, url.QueryEscape(p.base), p.port), mode)
}

// withMode adds a query mode to a DSN.
func withMode(dsn string, mode pgx.QueryExecMode) string {
	return dsn + "&default_query_exec_mode=" + strings.ReplaceAll(mode.String(), " ", "_")
}

// Stop ends it.
func (p *Pool) Stop() {
	_ = p.end.Close()
	<-p.done
}

// lockedBuffer takes what several goroutines write.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
