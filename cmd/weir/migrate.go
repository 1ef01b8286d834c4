package main

import (
	"github.com/spf13/cobra"

	"github.com/weirhq/weir"
)

func migrateCommand(g *global) *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "Install Weir in the database, or upgrade it",
		Long: `Installs Weir in the database, in the schema that --schema names, or upgrades it to the version of this program. What is
up to date is left as it is. It is one transaction: it happens as a whole or not at all. It waits for locks at most 3
seconds at a time, so nothing queues behind it for long, and tries again for up to two minutes.

It takes CREATE on the database, or an existing schema and CREATE on that. No extension is needed.`,
		Example: "  weir migrate\n  weir migrate --dsn postgres://app@db.example.com/shop --schema weir",
		Args:    arguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := weir.Open(cmd.Context(), g.dsn, &weir.Options{Schema: g.schema, Logger: g.logger(), Migrate: true})
			if err != nil {
				return err
			}
			client.Close()
			schema := g.schema
			if schema == "" {
				schema = "weir"
			}
			return g.done(map[string]string{"schema": schema}, "Weir is installed in schema %q and up to date", schema)
		},
	}
}
