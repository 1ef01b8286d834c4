package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func init() {
	registerPeer(Peer{
		Name: "pgq",
		Short: "PgQ with pgqd: insert_event, and a consumer that reads batch by batch and looks every millisecond; pgqd ticks " +
			"each second, as it does by default",
		Install: "apt-get install postgresql-NN-pgq3 pgqd, with NN the server's major version (Debian)",
		Missing: func(e *Env) error {
			if _, err := exec.LookPath("pgqd"); err != nil {
				return errors.New("there is no program pgqd")
			}
			return e.extension("pgq")
		},
		Version: func(ctx context.Context, e *Env) (string, error) { return e.extensionVersion(ctx, "pgq") },
		Open:    openPgQ,
	})
}

type pgqSystem struct {
	producers, consumers *pgxpool.Pool
	daemon               *exec.Cmd
	folder               string
}

func openPgQ(ctx context.Context, e *Env, shape Shape) (System, error) {
	dsn, err := e.Database(ctx)
	if err != nil {
		return nil, err
	}
	s := &pgqSystem{}
	if s.producers, err = pool(ctx, dsn, shape.Callers); err != nil {
		return nil, err
	}
	if s.consumers, err = pool(ctx, dsn, consumerConns); err != nil {
		return nil, err
	}
	for _, step := range []string{
		"create extension pgq",
		"select pgq.create_queue('orders')",
		"select pgq.register_consumer('orders', 'billing')",
	} {
		if _, err := s.producers.Exec(ctx, step); err != nil {
			return nil, fmt.Errorf("%s: %w", step, err)
		}
	}
	if err := s.start(s.producers.Config().ConnConfig); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// start runs the daemon that makes batches.
func (s *pgqSystem) start(config *pgx.ConnConfig) (err error) {
	if s.folder, err = os.MkdirTemp("", "bench-pgqd-"); err != nil {
		return err
	}
	file := filepath.Join(s.folder, "pgqd.ini")
	text := fmt.Sprintf("[pgqd]\nbase_connstr = host=%s port=%d user=%s\ninitial_database = %s\ndatabase_list = %s\n",
		config.Host, config.Port, config.User, config.Database, config.Database)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	s.daemon = exec.Command("pgqd", "-q", file)
	var said bytes.Buffer
	s.daemon.Stdout, s.daemon.Stderr = &said, &said
	if err := s.daemon.Start(); err != nil {
		return err
	}
	// Its first tick says that it works.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		var ticks int
		if err := s.consumers.QueryRow(ctx, "select count(*) from pgq.tick").Scan(&ticks); err != nil {
			return err
		}
		if ticks > 1 {
			return nil
		}
		// An idle queue is not ticked for a minute, so give it something to tick for.
		if _, err := s.consumers.Exec(ctx, "select pgq.insert_event('orders', 'none', '')"); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("pgqd does not tick: %s", strings.TrimSpace(said.String()))
}

func (s *pgqSystem) Produce(ctx context.Context, orders []Order) error {
	payloads := make([]string, len(orders))
	for i := range orders {
		payload, err := json.Marshal(&orders[i])
		if err != nil {
			return err
		}
		payloads[i] = string(payload)
	}
	if len(orders) == 1 {
		_, err := s.producers.Exec(ctx, "select pgq.insert_event('orders', 'order', $1)", payloads[0])
		return err
	}
	_, err := s.producers.Exec(ctx, "select count(pgq.insert_event('orders', 'order', payload)) from unnest($1::text[]) as payload", payloads)
	return err
}

func (s *pgqSystem) Consume(ctx context.Context, handle func(*Order)) error {
	for ctx.Err() == nil {
		var batch *int64
		if err := s.consumers.QueryRow(ctx, "select pgq.next_batch('orders', 'billing')").Scan(&batch); err != nil {
			return err
		}
		if batch == nil {
			time.Sleep(time.Millisecond)
			continue
		}
		rows, err := s.consumers.Query(ctx, "select ev_data from pgq.get_batch_events($1) where ev_type = 'order'", *batch)
		if err != nil {
			return err
		}
		var payload []byte
		if _, err := pgx.ForEachRow(rows, []any{&payload}, func() error {
			var o Order
			if err := json.Unmarshal(payload, &o); err != nil {
				return err
			}
			handle(&o)
			return nil
		}); err != nil {
			return err
		}
		if _, err := s.consumers.Exec(ctx, "select pgq.finish_batch($1)", *batch); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (s *pgqSystem) Close() {
	if s.daemon != nil && s.daemon.Process != nil {
		_ = s.daemon.Process.Kill()
		_ = s.daemon.Wait()
	}
	os.RemoveAll(s.folder)
	s.producers.Close()
	s.consumers.Close()
}
