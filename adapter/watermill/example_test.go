package weirwatermill_test

import (
	"context"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	weirwatermill "github.com/weirhq/weir/adapter/watermill"
)

// A router that bills orders, and an order whose message is stored in the transaction that books it.
func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	pool, err := pgxpool.New(ctx, exampleDSN())
	check(err)
	defer pool.Close()
	client, err := weir.New(pool, nil)
	check(err)
	defer client.Close()
	check(client.Migrate(ctx))

	subscriber, err := weirwatermill.NewSubscriber(client, "billing", nil)
	check(err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	check(err)
	router.AddConsumerHandler("bill", "orders", subscriber, func(m *message.Message) error {
		received, _ := weirwatermill.ReceivedFrom(m.Context())
		fmt.Printf("bill order %s of %s\n", m.Payload, received.Key)
		stop()
		return nil // an error is a Nack: the message comes again
	})
	check(subscriber.SubscribeInitialize("orders")) // the router subscribes later

	tx, err := pool.Begin(ctx)
	check(err)
	// The business data is written in tx.
	publisher, err := weirwatermill.NewTxPublisher(client, tx, &weirwatermill.PublisherConfig{
		MessageKey: func(_ string, m *message.Message) string { return m.Metadata.Get("customer") },
	})
	check(err)
	order := message.NewMessage(watermill.NewUUID(), message.Payload("4711"))
	order.Metadata.Set("customer", "ada")
	check(publisher.Publish("orders", order))
	check(tx.Commit(ctx))
	publisher.Wake()

	check(router.Run(ctx))
	// Output: bill order 4711 of ada
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// exampleDSN names an empty database.
func exampleDSN() string {
	const name = "example"
	check(server.CreateDatabase(context.Background(), name))
	return server.DSN(name)
}
