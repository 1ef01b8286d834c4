// Command orderperkey handles the steps of several orders: those of one order in their order and one at a time, also when one fails
// and is tried again, and those of different orders at once. It ends when all steps are handled.
//
// WEIR_DSN names the database, or else the PG* variables do.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weirhq/weir"
)

var (
	orders = []string{"order-1", "order-2", "order-3", "order-4"}
	steps  = []string{"placed", "paid", "packed", "sent"}
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	client, err := weir.Open(ctx, os.Getenv("WEIR_DSN"), &weir.Options{Migrate: true})
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.CreateTopic(ctx, "steps", nil); err != nil {
		return err
	}
	// Consumers take free shards of an ordered group; all messages of a key are in one shard. Nothing is assigned, so that nothing
	// is rebalanced when a consumer comes or goes.
	err = client.CreateGroup(ctx, "steps", "shop", &weir.GroupOptions{Mode: weir.Ordered, Shards: 16, RetryDelay: 200 * time.Millisecond})
	if err != nil {
		return err
	}
	var messages []weir.Message
	for _, step := range steps {
		for _, order := range orders {
			messages = append(messages, weir.Message{Key: order, Payload: step})
		}
	}
	if _, err := client.Produce(ctx, "steps", messages...); err != nil {
		return err
	}

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var (
		mu   sync.Mutex
		all  []string // orders, as their steps were handled
		done = map[string][]string{}
	)
	handler := weir.Handle(func(_ context.Context, m *weir.Received[string]) error {
		mu.Lock()
		defer mu.Unlock()
		if m.Key == "order-2" && m.Value == "paid" && m.Attempt < 3 {
			return errors.New("the bank does not answer") // its later steps wait, those of other orders do not
		}
		all, done[m.Key] = append(all, m.Key), append(done[m.Key], m.Value)
		if len(all) == len(messages) {
			stop()
		}
		return nil
	})
	consumer, err := client.NewConsumer("steps", "shop", handler, &weir.ConsumerOptions{Concurrency: 8})
	if err != nil {
		return err
	}
	if err := consumer.Run(ctx); err != nil {
		return err
	}
	for _, order := range orders {
		fmt.Printf("%s: %s\n", order, strings.Join(done[order], ", "))
	}
	if slices.Equal(all[len(all)-3:], []string{"order-2", "order-2", "order-2"}) {
		fmt.Println("nobody waited for order-2")
	}
	return nil
}
