// Command outbox books orders and announces them, each order and its message in one transaction: either both exist or neither
// does. It then handles the messages, and ends when it has seen all of them.
//
// WEIR_DSN names the database, or else the PG* variables do. It makes a table "orders" in it.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
)

// order is the payload of a message.
type order struct {
	ID       int64  `json:"id"`
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

var errNoCredit = errors.New("no credit")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("WEIR_DSN"))
	if err != nil {
		return err
	}
	defer pool.Close()
	client, err := weir.New(pool, nil)
	if err != nil {
		return err
	}
	defer client.Close()
	if err := prepare(ctx, pool, client); err != nil {
		return err
	}

	booked := map[int64]bool{}
	for _, o := range []order{{0, "ada", 1250}, {0, "bob", 999_999_99}, {0, "eve", 4200}} {
		id, err := book(ctx, pool, client, o)
		if errors.Is(err, errNoCredit) {
			fmt.Printf("%s: refused: %v\n", o.Customer, err)
			continue
		}
		if err != nil {
			return err
		}
		booked[id] = true
	}

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	consumer, err := client.NewConsumer("orders", "mail", weir.Handle(func(_ context.Context, m *weir.Received[order]) error {
		// A message can be handed out more than once. What this handler does, it can do twice.
		fmt.Printf("%s: order confirmed\n", m.Value.Customer)
		delete(booked, m.Value.ID) // one handler at a time: Concurrency is 1
		if len(booked) == 0 {
			stop()
		}
		return nil
	}), nil)
	if err != nil {
		return err
	}
	return consumer.Run(ctx)
}

func prepare(ctx context.Context, pool *pgxpool.Pool, client *weir.Client) error {
	if err := client.Migrate(ctx); err != nil {
		return err
	}
	if err := client.CreateTopic(ctx, "orders", nil); err != nil {
		return err
	}
	if err := client.CreateGroup(ctx, "orders", "mail", nil); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, `
		create table if not exists orders (
			id bigint generated always as identity primary key,
			customer text not null,
			cents bigint not null
		)`)
	return err
}

// book stores an order and its message in one transaction.
func book(ctx context.Context, pool *pgxpool.Pool, client *weir.Client, o order) (id int64, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, "insert into orders (customer, cents) values ($1, $2) returning id", o.Customer, o.Cents).Scan(&o.ID)
		if err != nil {
			return err
		}
		if _, err := client.ProduceTx(ctx, tx, "orders", weir.Message{Key: o.Customer, Payload: o}); err != nil {
			return err
		}
		if o.Cents > 100_000_00 {
			return errNoCredit // rolls back the order and its message
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	client.Wake("orders") // consumers look at once, not at their next poll
	return o.ID, nil
}
