// Command compacted feeds the changes of a table into a compacted topic, by a trigger, in the transactions that make them. The topic
// keeps the latest message of each row; a row that was deleted is a tombstone. A consumer keeps a cache up to date, and one that
// starts later gets there by the messages that are left.
//
// WEIR_DSN names the database, or else the PG* variables do. It makes a table "product" in it.
package main

import (
	"context"
	"fmt"
	"log"
	"maps"
	"os"
	"os/signal"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
)

// product is a row of the table, and the payload of a message. The message's key is the row's.
type product struct {
	SKU   string `json:"sku"`
	Cents int64  `json:"cents"`
}

// feed produces a message for each row that changes. Whoever changes rows calls weir.produce: their role needs EXECUTE on it, or the
// function is made SECURITY DEFINER by a role that has it.
const feed = `
create table if not exists product (sku text primary key, cents bigint not null);
create or replace function product_feed() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' or tg_op = 'UPDATE' and new.sku <> old.sku then
        perform weir.produce('products', null, key => old.sku);
    end if;
    if tg_op <> 'DELETE' then
        perform weir.produce('products', to_json(new), key => new.sku);
    end if;
    return null;
end
$$;
create or replace trigger product_feed after insert or update or delete on product for each row execute function product_feed();`

// changes are each a transaction.
var changes = []string{
	"insert into product values ('bolt', 40), ('nail', 5), ('screw', 12)",
	"update product set cents = cents + 1",
	"delete from product where sku = 'nail'",
	"update product set cents = 45 where sku = 'bolt'",
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
	if err := client.Migrate(ctx); err != nil {
		return err
	}
	if err := client.CreateTopic(ctx, "products", &weir.TopicOptions{Compact: true}); err != nil {
		return err
	}
	// The messages of a row are handled in their order.
	if err := client.CreateGroup(ctx, "products", "cache", &weir.GroupOptions{Mode: weir.Ordered}); err != nil {
		return err
	}
	if _, err := pool.Exec(ctx, feed); err != nil {
		return err
	}
	for _, change := range changes {
		if _, err := pool.Exec(ctx, change); err != nil {
			return err
		}
	}
	client.Wake("products") // consumers look at once, not at their next poll

	cache := map[string]product{}
	consumer, err := client.NewConsumer("products", "cache", weir.Handle(func(_ context.Context, m *weir.Received[product]) error {
		if m.Tombstone {
			delete(cache, m.Key) // one handler at a time: Concurrency is 1
		} else {
			cache[m.Key] = m.Value
		}
		return nil
	}), nil)
	if err != nil {
		return err
	}
	following, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(following) }()
	err = caughtUp(ctx, client)
	stop()
	if ran := <-ended; err == nil {
		err = ran
	}
	if err != nil {
		return err
	}
	for _, sku := range slices.Sorted(maps.Keys(cache)) {
		fmt.Printf("%s costs %d cents\n", sku, cache[sku].Cents)
	}

	// The latest message of a key, without a group.
	for _, sku := range []string{"bolt", "nail"} {
		m, found, err := client.Current(ctx, "products", sku)
		if err != nil {
			return err
		}
		fmt.Printf("current %s: %v %s\n", sku, found, m.Value)
	}
	return nil
}

// caughtUp waits until the group has handled all there is.
func caughtUp(ctx context.Context, client *weir.Client) error {
	for {
		g, err := client.Group(ctx, "products", "cache")
		if err != nil || g.Lag == 0 && g.Waiting == 0 && g.Retrying == 0 {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}
