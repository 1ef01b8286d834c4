// Command jobs works jobs off: each has a priority, a time before which it does not begin, a time limit, and attempts. It ends when
// all jobs are done or dead.
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
	"time"

	"github.com/weirhq/weir"
)

// job is the payload of a message.
type job struct {
	Name string `json:"name"`
	// Fails is how many attempts fail, Takes how long the first one takes.
	Fails int           `json:"fails,omitempty"`
	Takes time.Duration `json:"takes,omitempty"`
}

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
	if err := client.CreateTopic(ctx, "jobs", nil); err != nil {
		return err
	}
	// A queue group hands out every message by itself, the highest priority first.
	err = client.CreateGroup(ctx, "jobs", "workers", &weir.GroupOptions{Mode: weir.Queue, MaxAttempts: 3, RetryDelay: 100 * time.Millisecond})
	if err != nil {
		return err
	}
	_, err = client.Produce(ctx, "jobs",
		weir.Message{Payload: job{Name: "monthly report"}, Priority: -5},
		weir.Message{Payload: job{Name: "reminder"}, Delay: 1500 * time.Millisecond},
		weir.Message{Payload: job{Name: "import", Fails: 1}},
		weir.Message{Payload: job{Name: "thumbnail", Takes: time.Hour}, Timeout: 300 * time.Millisecond},
		weir.Message{Payload: job{Name: "fax", Fails: 100}},
		weir.Message{Payload: job{Name: "password mail"}, Priority: 10},
	)
	if err != nil {
		return err
	}

	consumer, err := client.NewConsumer("jobs", "workers", weir.Handle(work), nil) // more at once: Concurrency
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx) }()
	err = idle(ctx, client)
	stop()
	if ran := <-ended; err == nil {
		err = ran
	}
	return err
}

func work(ctx context.Context, m *weir.Received[job]) error {
	j := m.Value
	if m.Attempt == 1 && j.Takes > 0 {
		select {
		case <-time.After(j.Takes):
		case <-ctx.Done(): // its time limit, or the consumer stops
			fmt.Printf("%s, attempt %d: %v\n", j.Name, m.Attempt, context.Cause(ctx))
			return context.Cause(ctx)
		}
	}
	if m.Attempt <= j.Fails {
		fmt.Printf("%s, attempt %d: failed\n", j.Name, m.Attempt)
		return errors.New("it did not work") // tried again after RetryDelay, doubled each time
	}
	fmt.Printf("%s, attempt %d: done\n", j.Name, m.Attempt)
	return nil
}

// idle waits until no job is left but dead ones, and says how many those are.
func idle(ctx context.Context, client *weir.Client) error {
	for {
		g, err := client.Group(ctx, "jobs", "workers")
		if err != nil {
			return err
		}
		if g.Lag == 0 && g.Waiting == 0 && g.Retrying == 0 {
			fmt.Printf("%d dead\n", g.Dead)
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
}
