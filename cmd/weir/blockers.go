package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

func blockersCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "blockers [TOPIC]",
		Short: "Show the transactions that messages wait for",
		Long: `Shows the open transactions that have produced to a topic, or to any, while later messages wait behind them: a group is not
given a message before it is certain that no lower id can still appear. WAITING is how many ids are behind it, at most.

End one that its program does not end with "select pg_terminate_backend(PID)", or "rollback prepared 'GID'". Nothing
here, and a group that does not move: look at its consumers, not at the producers.`,
		Example:           "  weir blockers\n  weir blockers events --output json",
		Args:              arguments,
		ValidArgsFunction: completeNames(g),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := g.open(cmd.Context())
			if err != nil {
				return err
			}
			defer client.Close()
			topic := ""
			if len(args) > 0 {
				topic = args[0]
				if _, err := client.Topic(cmd.Context(), topic); err != nil {
					return err
				}
			}
			list, err := client.Blockers(cmd.Context(), topic)
			if err != nil {
				return err
			}
			return printAll(g, list, blockerHeader, blockerRow)
		},
	}
}

const blockerHeader = "TOPIC PID GID AGE STATE APPLICATION WAITING QUERY"

func blockerRow(b weir.Blocker) []any {
	return []any{b.Topic, b.PID, b.GID, b.Age.Round(time.Millisecond), b.State, b.Application, b.Waiting, b.Query}
}
