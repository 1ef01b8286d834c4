// Command deadletters shows what becomes of messages that cannot be handled: they are listed with the error of each attempt, redriven
// once the cause is gone, or removed.
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
	"sync/atomic"
	"time"

	"github.com/weirhq/weir"
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
	if err := client.CreateTopic(ctx, "invoices", nil); err != nil {
		return err
	}
	err = client.CreateGroup(ctx, "invoices", "print", &weir.GroupOptions{MaxAttempts: 2, RetryDelay: 50 * time.Millisecond})
	if err != nil {
		return err
	}
	_, err = client.Produce(ctx, "invoices",
		weir.Message{Key: "ada", Payload: "5 screws"},
		weir.Message{Key: "bob", Payload: ""},
		weir.Message{Key: "eve", Payload: "2 nails"},
		weir.Message{Key: "fay", Payload: 17}, // no string
	)
	if err != nil {
		return err
	}

	var paper atomic.Bool
	consumer, err := client.NewConsumer("invoices", "print", weir.Handle(func(_ context.Context, m *weir.Received[string]) error {
		if m.Value == "" {
			return weir.Dead(errors.New("nothing is on it")) // at once, without further attempts
		}
		if m.Key == "eve" && !paper.Load() {
			return errors.New("no paper")
		}
		fmt.Printf("%s: printed\n", m.Key)
		return nil
	}), nil)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	err = func() error {
		if err := settled(ctx, client, 3); err != nil {
			return err
		}
		list, err := client.DeadLetters(ctx, "invoices", "print", 0, 100)
		if err != nil {
			return err
		}
		for _, d := range list {
			fmt.Printf("dead: %s, attempt %d: %s\n", d.Key, d.Attempt, d.Error)
		}

		paper.Store(true) // the cause is gone
		n, err := client.RedriveMany(ctx, "invoices", "print", weir.DeadFilter{Error: "no paper"}, nil)
		if err != nil {
			return err
		}
		fmt.Printf("redriven: %d\n", n)
		if err := settled(ctx, client, 2); err != nil {
			return err
		}
		n, err = client.PurgeMany(ctx, "invoices", "print", weir.DeadFilter{}, nil)
		if err != nil {
			return err
		}
		fmt.Printf("removed: %d\n", n)
		return nil
	}()
	stop()
	if ran := <-ended; err == nil {
		err = ran
	}
	return err
}

// settled waits until everything is handled but so many dead letters.
func settled(ctx context.Context, client *weir.Client, dead int) error {
	for {
		g, err := client.Group(ctx, "invoices", "print")
		if err != nil || g.Lag == 0 && g.Retrying == 0 && g.Waiting == 0 && g.Dead == dead {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}
