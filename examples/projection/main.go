// Command projection keeps a read model, the balance of each account, from a topic of its entries. The model and the progress of
// its group are committed together, so that each entry counts once, however often it is handed out.
//
// It then throws the model away and builds it again from the first entry on.
//
// WEIR_DSN names the database, or else the PG* variables do. It makes a table "balance" in it.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
)

// entry is the payload of a message. Its key is the account.
type entry struct {
	Cents int64 `json:"cents"`
}

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

	var entries []weir.Message
	for i := range int64(30) {
		entries = append(entries, weir.Message{Key: []string{"ada", "bob", "eve"}[i%3], Payload: entry{Cents: 100 * (i + 1)}})
	}
	if _, err := client.Produce(ctx, "entries", entries...); err != nil {
		return err
	}

	// The consumer goes on while the model is built anew.
	consumer, err := client.NewConsumer("entries", "balance", weir.HandleTx(apply), &weir.ConsumerOptions{Concurrency: 3})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	err = func() error {
		if err := caughtUp(ctx, client); err != nil {
			return err
		}
		if err := show(ctx, pool, "balances"); err != nil {
			return err
		}
		if err := rebuild(ctx, pool); err != nil {
			return err
		}
		client.Wake("entries") // the consumer looks at once, not at its next poll
		if err := caughtUp(ctx, client); err != nil {
			return err
		}
		return show(ctx, pool, "built again")
	}()
	stop()
	if ran := <-ended; err == nil {
		err = ran
	}
	return err
}

func prepare(ctx context.Context, pool *pgxpool.Pool, client *weir.Client) error {
	if err := client.Migrate(ctx); err != nil {
		return err
	}
	if err := client.CreateTopic(ctx, "entries", nil); err != nil {
		return err
	}
	if err := client.CreateGroup(ctx, "entries", "balance", &weir.GroupOptions{Mode: weir.Ordered}); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, "create table if not exists balance (account text primary key, cents bigint not null, entries int not null)")
	return err
}

// apply adds an entry to the model, in the transaction in which its message is acknowledged.
func apply(ctx context.Context, tx pgx.Tx, m *weir.Received[entry]) error {
	_, err := tx.Exec(ctx, `
		insert into balance as b (account, cents, entries) values ($1, $2, 1)
		on conflict (account) do update set cents = b.cents + excluded.cents, entries = b.entries + 1`,
		m.Key, m.Value.Cents)
	return err
}

// rebuild empties the model and moves its group back to the beginning, in one transaction. The table comes first: TRUNCATE waits
// for handlers that have written to it, and they acknowledge before they end. Those that write later find their lease gone, and
// are rolled back.
func rebuild(ctx context.Context, pool *pgxpool.Pool) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "truncate balance"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `select weir.seek('entries', 'balance', '"beginning"')`)
		return err
	})
}

// caughtUp waits until the group has handled all there is.
func caughtUp(ctx context.Context, client *weir.Client) error {
	for {
		g, err := client.Group(ctx, "entries", "balance")
		if err != nil || g.Lag == 0 && g.Waiting == 0 && g.Retrying == 0 {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func show(ctx context.Context, pool *pgxpool.Pool, title string) error {
	rows, err := pool.Query(ctx, "select account, cents, entries from balance order by account")
	if err != nil {
		return err
	}
	fmt.Println(title)
	var (
		account        string
		cents, entries int64
	)
	_, err = pgx.ForEachRow(rows, []any{&account, &cents, &entries}, func() error {
		fmt.Printf("  %s: %d cents in %d entries\n", account, cents, entries)
		return nil
	})
	return err
}
