package weir

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir/sql"
)

// minServer is the oldest server that has what Weir needs (pg_current_xact_id and parameters of its kind, 14).
const minServer = 140000

// Options are the options of a Client. The zero value is ready to use.
type Options struct {
	// Schema is the schema that Weir is installed in: 1 to 40 lower-case letters, digits and underscores. Default "weir".
	// Several installs, each in a schema of its own, can live in one database.
	Schema string
	// Logger receives what an operator should know. Default slog.Default(). An idle client logs nothing.
	Logger *slog.Logger
	// Migrate installs the schema, or upgrades it, when the client opens.
	Migrate bool
	// NoListen leaves LISTEN and NOTIFY out: consumers find messages by polling alone. For connections through a pooler in
	// transaction mode, where LISTEN is not to be had. Default false.
	NoListen bool
	// NoMaintenance leaves the upkeep of the install to other clients and to "weir maintain": making segments ahead, retention,
	// compaction. Default false: this client takes part, one at a time in the whole install.
	NoMaintenance bool
	// ProduceRetry is how long Produce goes on trying when the server cannot be reached or a connection is lost, and Copy
	// asking for the outcome of its commit. An attempt is not cut short by it. Default 30 s, negative: not at all.
	ProduceRetry time.Duration
}

// Client is a handle on one install of Weir in one database. It is safe for concurrent use by any number of goroutines.
type Client struct {
	pool    *pgxpool.Pool
	ownPool bool
	schema  string
	log     *slog.Logger
	listen  bool
	// maintains: this client takes part in maintenance, from its first call on
	maintains bool
	upkeep    sync.Once

	checking sync.Mutex
	// checked: server and schema fit, as the pool sees them; fits: the schema does, as a transaction of a caller's sees it.
	checked, fits atomic.Bool
	// readCommitted is set when the server's default isolation is another, so that each statement needs a transaction.
	readCommitted bool

	produceRetry time.Duration
	producers    producers

	texts   sync.Map // file of sql/client -> text
	topics  sync.Map // name -> topicInfo
	waker   waker
	sharing sharing
	// handlers bounds the handlers that hold a connection of the pool
	handlers chan struct{}
}

// Open connects to the server that dsn names (a URL or keyword/value string as pgx takes it; "" for the PG* environment
// variables) and checks that the installed schema and this library fit each other. Close it after use.
//
// Errors: ErrSchemaMissing, ErrSchemaOld (neither with Options.Migrate), ErrSchemaNew, ErrServer, ErrInvalid, or what
// prevented the connection.
func Open(ctx context.Context, dsn string, o *Options) (*Client, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("%w: dsn: %w", ErrInvalid, err)
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = "weir"
	}
	if !strings.Contains(dsn, "pool_max_conns") {
		config.MaxConns = max(config.MaxConns, int32(runtime.NumCPU()), 8)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("%w: dsn: %w", ErrInvalid, err)
	}
	c, err := New(pool, o)
	if err != nil {
		pool.Close()
		return nil, err
	}
	c.ownPool = true
	if o != nil && o.Migrate {
		err = c.Migrate(ctx)
	}
	if err == nil {
		err = c.ready(ctx, nil)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// New makes a Client on a pool of the caller's, which Close leaves open. It does not contact the server: the first call that
// does checks the schema's version, with the errors of Open.
//
// One connection in the pool is enough. A running consumer holds none while it waits; the connection that listens for
// wake-ups is not one of the pool's.
func New(pool *pgxpool.Pool, o *Options) (*Client, error) {
	if pool == nil {
		return nil, invalid("pool", nil, "it must be a pool of connections")
	}
	if o == nil {
		o = &Options{}
	}
	c := &Client{pool: pool, schema: o.Schema, log: o.Logger, listen: !o.NoListen, maintains: !o.NoMaintenance, produceRetry: cmp.Or(o.ProduceRetry, 30*time.Second)}
	if c.schema == "" {
		c.schema = sql.DefaultSchema
	}
	if err := sql.CheckSchema(c.schema); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if c.log == nil {
		c.log = slog.Default()
	}
	c.waker.init(c)
	c.handlers = make(chan struct{}, max(1, pool.Config().MaxConns-1))
	return c, nil
}

// Close stops what the client runs by itself and closes its connections. Stop its consumers first: cancel the contexts of
// their Run and wait for it to return.
func (c *Client) Close() {
	c.waker.close()
	if !c.ownPool {
		return
	}
	// The pool closes its connections one after the other, and each that is half open takes a while.
	closed := make(chan struct{})
	go func() { c.pool.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(callTimeout):
	}
}

// text is the statement in sql/client of that name.
func (c *Client) text(name string) string {
	if t, ok := c.texts.Load(name); ok {
		return t.(string)
	}
	t := sql.Text(c.schema, "client/"+name+".sql")
	c.texts.Store(name, t)
	return t
}

// ready checks once that server, schema and library fit.
//
// It asks q, a transaction of the caller's, where there is one: that may have the pool's last connection, and whoever else
// checks may wait for it.
func (c *Client) ready(ctx context.Context, q querier) error {
	if c.checked.Load() {
		return nil
	}
	if q != nil {
		if c.fits.Load() {
			return nil
		}
		installed, err := c.installed(ctx, q)
		if err == nil {
			err = installed.check(c.schema)
		}
		c.fits.Store(err == nil)
		return err
	}
	c.checking.Lock()
	defer c.checking.Unlock()
	if c.checked.Load() {
		return nil
	}
	var (
		isolation string
		standby   bool
		server    int
	)
	err := c.pool.QueryRow(ctx, c.text("begin")).Scan(&isolation, &standby, &server)
	if err != nil {
		return fmt.Errorf("contact the server: %w", err)
	}
	if server < minServer {
		return fmt.Errorf("%w: it is PostgreSQL %d, Weir needs 14 or later", ErrServer, server/10000)
	}
	installed, err := c.installed(ctx, c.pool)
	if err != nil {
		return err
	}
	if err := installed.check(c.schema); err != nil {
		return err
	}
	c.readCommitted = isolation != "read committed"
	c.checked.Store(true)
	if c.maintains {
		c.upkeep.Do(func() { c.waker.background(c.maintain) })
	}
	return nil
}

// querier is what statements are sent through: the pool, or a transaction of the caller's.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// query sends the statement of that name and hands each row to scan.
//
// Sent through the pool it is a transaction of its own at READ COMMITTED, so that each statement inside the functions has a
// snapshot of its own, whatever the server's default isolation is.
func (c *Client) query(ctx context.Context, q querier, name string, args []any, scan func(pgx.Rows) error) error {
	if err := c.ready(ctx, q); err != nil {
		return err
	}
	run := func(q querier) error {
		rows, err := q.Query(ctx, c.text(name), args...)
		if err != nil {
			return err
		}
		return each(rows, scan)
	}
	var err error
	if q != nil {
		err = run(q)
	} else if c.readCommitted {
		err = pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error { return run(tx) })
	} else {
		err = run(c.pool)
	}
	return explain(err)
}

// each hands rows to scan, where there is one, and closes them.
func each(rows pgx.Rows, scan func(pgx.Rows) error) error {
	defer rows.Close()
	for rows.Next() {
		if scan == nil {
			continue
		}
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// one sends a statement that gives one value.
func one[T any](ctx context.Context, c *Client, q querier, name string, args ...any) (T, error) {
	var value T
	err := c.query(ctx, q, name, args, func(rows pgx.Rows) error { return rows.Scan(&value) })
	return value, err
}

// CanRetry reports whether an error came from the server or the connection and not from the call's arguments, so that the
// same call may succeed later: a lost connection, a restart, a deadlock or a serialization failure. A produce that ended
// with ErrUnknownOutcome may have been stored nevertheless, one in a transaction of the caller's if its commit may have been.
func CanRetry(err error) bool {
	if errors.Is(err, context.Canceled) {
		return false
	}
	var pg *pgconn.PgError
	return transient(err) || err != nil && !errors.As(err, &pg) && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrFormat)
}
