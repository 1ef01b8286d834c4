package weir

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir/sql"
)

// compatible is the lowest schema version whose library can work on the schema that this library installs.
const compatible = 2

// schemaVersion is the version this library installs: the number of its last schema step.
var schemaVersion = len(sql.List("schema"))

// installedSchema is what a database says of its install.
type installedSchema struct {
	version, compatible int
	functions           string
}

func (c *Client) installed(ctx context.Context, q querier) (installedSchema, error) {
	var s installedSchema
	var args []any
	if c.pool.Config().ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		// Where nothing is installed the server refuses to prepare this. PgBouncer takes the name for taken all the same, and cuts the
		// connection when it is prepared again, after the install.
		args = []any{pgx.QueryExecModeExec}
	}
	rows, err := q.Query(ctx, c.text("version"), args...)
	if err == nil {
		s, err = pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (s installedSchema, err error) {
			return s, row.Scan(&s.version, &s.compatible, &s.functions)
		})
	}
	if err = explain(err); errors.Is(err, ErrSchemaMissing) || errors.Is(err, pgx.ErrNoRows) {
		return installedSchema{}, nil
	}
	return s, err
}

func (s installedSchema) check(schema string) error {
	switch {
	case s.version == 0:
		return fmt.Errorf("%w in schema %q of this database: run \"weir migrate\" or Client.Migrate, or correct the schema's name", ErrSchemaMissing, schema)
	case s.version < schemaVersion:
		return fmt.Errorf("%w: schema %q has version %d, this library needs %d: run \"weir migrate\" or Client.Migrate", ErrSchemaOld, schema, s.version, schemaVersion)
	case s.compatible > schemaVersion:
		return fmt.Errorf("%w: schema %q has version %d, which needs a library of version %d, this is %d: upgrade this program", ErrSchemaNew, schema, s.version, s.compatible, schemaVersion)
	}
	return nil
}

// Migrate installs Weir in its schema, or upgrades it to this library's version; when that is installed already it changes
// nothing. Any number of processes may call it at once. It is one transaction: it happens as a whole or not at all.
//
// The schema is created if it does not exist, which takes CREATE on the database; in an existing schema CREATE on that is
// enough. No extension is needed and nothing is granted to PUBLIC.
//
// What other roles were granted on functions and views they keep. They are granted what replaces it, too: the functions that this
// library calls in place of those that they could call, and those that a view which they can read calls.
//
// It waits for locks at most 3 seconds at a time, so that nothing queues behind it for long, and tries again until ctx ends
// or two minutes have passed.
//
// Errors: ErrSchemaNew, ErrStandby, ErrServer, or what the server refused.
func (c *Client) Migrate(ctx context.Context) error {
	deadline := time.Now().Add(2 * time.Minute)
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		err := c.migrateOnce(ctx)
		if err == nil || !transient(err) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("migrate: %w (last: %w)", context.Cause(ctx), err)
		case <-time.After(jitter(wait)):
		}
	}
}

func (c *Client) migrateOnce(ctx context.Context) error {
	now, err := c.installed(ctx, c.pool)
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	want := installedSchema{schemaVersion, compatible, sql.ReplacedSum()}
	if now.version > schemaVersion {
		return now.check(c.schema)
	}
	if now == want {
		return nil
	}
	var (
		isolation string
		standby   bool
		server    int
	)
	if err := c.pool.QueryRow(ctx, c.text("begin")).Scan(&isolation, &standby, &server); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	if server < minServer {
		return fmt.Errorf("migrate: %w: it is PostgreSQL %d, Weir needs 14 or later", ErrServer, server/10000)
	}
	if standby {
		return fmt.Errorf("migrate: %w: connect to the primary, for example with target_session_attrs=read-write", ErrStandby)
	}
	err = pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
		run := func(text string) error {
			// A file has several statements: the simple protocol takes them as they are.
			_, err := tx.Conn().PgConn().Exec(ctx, text).ReadAll()
			return err
		}
		if err := run("set local lock_timeout = '3s'; set local check_function_bodies = off; set local search_path = pg_catalog, pg_temp"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, c.text("migrate_lock")); err != nil {
			return err
		}
		// The transaction that held the lock before has committed: this statement sees what it did.
		exists := false
		if err := tx.QueryRow(ctx, "select to_regnamespace($1) is not null", c.schema).Scan(&exists); err != nil {
			return err
		}
		now := installedSchema{}
		if exists {
			err := pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) (err error) {
				now, err = c.installed(ctx, inner)
				if err == nil && now.version == 0 {
					err = errNothingInstalled // ends the savepoint that the failed statement broke
				}
				return err
			})
			if err != nil && !errors.Is(err, errNothingInstalled) {
				return err
			}
		} else if err := run(`create schema "` + c.schema + `"`); err != nil {
			return err
		}
		if now.version > schemaVersion || now == want {
			return nil
		}
		before := ""
		if now.version > 0 {
			if err := tx.QueryRow(ctx, c.text("migrate_rights")).Scan(&before); err != nil {
				return fmt.Errorf("read what is granted: %w", err)
			}
		}
		for _, file := range sql.List("schema")[now.version:] {
			if err := run(sql.Text(c.schema, file)); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
		for _, file := range sql.Replaced() {
			if err := run(sql.Text(c.schema, file)); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
		if err := run(c.text("migrate_finish")); err != nil {
			return err
		}
		if before != "" {
			var after, grants string
			err := tx.QueryRow(ctx, c.text("migrate_rights")).Scan(&after)
			if err == nil {
				err = tx.QueryRow(ctx, c.text("migrate_grants"), before, after).Scan(&grants)
			}
			if err == nil {
				err = run(grants)
			}
			if err != nil {
				return fmt.Errorf("keep what was granted: %w", err)
			}
		}
		_, err := tx.Exec(ctx, c.text("migrate_record"), want.version, want.compatible, want.functions)
		return err
	})
	if err != nil {
		return fmt.Errorf("migrate schema %q: %w", c.schema, err)
	}
	c.checked.Store(false)
	c.fits.Store(false)
	return nil
}

var errNothingInstalled = errors.New("nothing installed")
