package main

import (
	"context"
	"encoding/json"
	"os"

	"github.com/weirhq/weir"
)

func main() {
	ctx := context.Background()
	client, err := weir.Open(ctx, os.Getenv("WEIR_DSN"), &weir.Options{Migrate: true})
	check(err)
	check(client.CreateTopic(ctx, "greetings", nil))
	check(client.CreateGroup(ctx, "greetings", "printer", nil))
	_, err = client.Produce(ctx, "greetings", weir.Message{Payload: "hello"})
	check(err)
	consumer, err := client.NewConsumer("greetings", "printer", weir.Handle(func(_ context.Context, m *weir.Received[string]) error {
		return json.NewEncoder(os.Stdout).Encode(m.Value)
	}), nil)
	check(err)
	check(consumer.Run(ctx))
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
