// Command replay handles readings, and then handles them again: those since a moment, and all there are. It also reads the log without
// a group.
//
// WEIR_DSN names the database, or else the PG* variables do.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
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
	if err := client.CreateTopic(ctx, "readings", nil); err != nil {
		return err
	}
	if err := client.CreateGroup(ctx, "readings", "alarm", nil); err != nil {
		return err
	}
	for _, celsius := range []int{18, 19, 20} {
		if _, err := client.Produce(ctx, "readings", weir.Message{Key: "cellar", Payload: celsius}); err != nil {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
	moments, err := handle(ctx, client, "first")
	if err != nil {
		return err
	}

	// A group is moved at any time, also while consumers of it run: what they hold ends, and is handed out again from there on.
	if _, err := client.Seek(ctx, "readings", "alarm", weir.AtTime(moments[1])); err != nil {
		return err
	}
	if _, err := handle(ctx, client, "since the second"); err != nil {
		return err
	}
	was, err := client.Seek(ctx, "readings", "alarm", weir.Beginning())
	if err != nil {
		return err
	}
	fmt.Printf("the group was at %d\n", was)
	if _, err := handle(ctx, client, "all"); err != nil {
		return err
	}

	// Reading without a group moves nothing.
	after, err := client.After(ctx, "readings", weir.AtTime(moments[2]))
	if err != nil {
		return err
	}
	list, err := client.Read(ctx, "readings", after, 100)
	if err != nil {
		return err
	}
	for _, m := range list {
		fmt.Printf("read: %s\n", m.Value)
	}
	return nil
}

// handle runs a consumer until the group has handled all there is, and returns when the messages were produced.
func handle(ctx context.Context, client *weir.Client, title string) (moments []time.Time, err error) {
	ctx, stop := context.WithCancel(ctx)
	consumer, err := client.NewConsumer("readings", "alarm", weir.Handle(func(_ context.Context, m *weir.Received[int]) error {
		fmt.Printf("%s: %d degrees in the %s\n", title, m.Value, m.Key)
		moments = append(moments, m.ProducedAt) // one handler at a time: Concurrency is 1
		return nil
	}), nil)
	if err != nil {
		stop()
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	for err == nil {
		var g weir.Group
		if g, err = client.Group(ctx, "readings", "alarm"); g.Lag == 0 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	stop()
	if ran := <-ended; err == nil {
		err = ran
	}
	return moments, err
}
