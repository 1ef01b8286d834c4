package main

import (
	"context"
	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func init() {
	registerPeer(Peer{
		Name:  "floor",
		Short: "a plain table: COPY (INSERT for a single message) while one connection reads it by id, and skips what commits late",
		Skips: true,
		Open:  openFloor,
	})
}

// floorSystem is the least that storing messages and reading them back can cost. Its reader remembers the highest id it has seen and
// goes on from there: what commits below that later it never sees.
type floorSystem struct {
	pool *pgxpool.Pool
	dsn  string
}

func openFloor(ctx context.Context, e *Env, shape Shape) (System, error) {
	dsn, err := e.Database(ctx)
	if err != nil {
		return nil, err
	}
	p, err := pool(ctx, dsn, shape.Callers)
	if err != nil {
		return nil, err
	}
	_, err = p.Exec(ctx, "create table floor (id bigint generated always as identity primary key, payload json not null)")
	return &floorSystem{p, dsn}, err
}

func (s *floorSystem) Produce(ctx context.Context, orders []Order) error {
	payloads := make([][]byte, len(orders))
	for i := range orders {
		var err error
		if payloads[i], err = json.Marshal(&orders[i]); err != nil {
			return err
		}
	}
	if len(orders) == 1 {
		_, err := s.pool.Exec(ctx, "insert into floor (payload) values ($1)", payloads[0])
		return err
	}
	_, err := s.pool.CopyFrom(ctx, pgx.Identifier{"floor"}, []string{"payload"},
		pgx.CopyFromSlice(len(payloads), func(i int) ([]any, error) { return []any{payloads[i]}, nil }))
	return err
}

func (s *floorSystem) Consume(ctx context.Context, handle func(*Order)) error {
	conn, err := pgx.Connect(ctx, s.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var last int64
	for ctx.Err() == nil {
		rows, err := conn.Query(ctx, "select id, payload from floor where id > $1 order by id limit 1000", last)
		if err != nil {
			return err
		}
		var payload []byte
		tag, err := pgx.ForEachRow(rows, []any{&last, &payload}, func() error {
			var o Order
			if err := json.Unmarshal(payload, &o); err != nil {
				return err
			}
			handle(&o)
			return nil
		})
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			time.Sleep(2 * time.Millisecond)
		}
	}
	return ctx.Err()
}

func (s *floorSystem) Close() { s.pool.Close() }
